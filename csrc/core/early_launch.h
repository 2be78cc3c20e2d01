// Launches of one stream that overlap (programmatic dependent launch). On GPUs before Hopper these
// functions do nothing, and no kernel is launched early there (launch/launch_kernel.h).
#pragma once

namespace flash {

// The stream's next launch, if it is an early one, may start as soon as every CTA of this launch
// has called this or has ended.
__device__ inline void let_next_launch_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the launch before has ended and what it wrote can be read. At least one CTA of an
// early launch has to wait: the launch that follows in the stream waits for this one alone.
__device__ inline void wait_for_launch_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash
