// Launches of one stream that overlap (programmatic dependent launch). Code for GPUs before Hopper
// says nothing of it, and is never launched early (launch/launch_kernel.h).
#pragma once

namespace flash {

// The stream's next launch may start, if it is an early one, as soon as all thread blocks of this
// one have said this, or have ended.
__device__ inline void let_next_launch_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the launch before has ended, and what it wrote can be read. At least one thread block of an
// early launch has to: what comes next in the stream waits for this launch alone.
__device__ inline void wait_for_launch_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash
