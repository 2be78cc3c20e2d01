#pragma once

namespace flash {

// Keeps the compiler from moving ordinary memory accesses across it: the instructions by which
// CUTLASS waits for asynchronous copies do not declare that they concern memory.
__device__ inline void compiler_fence() { asm volatile("" ::: "memory"); }

}  // namespace flash
