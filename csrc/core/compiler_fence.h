#pragma once

namespace flash {

// Keeps the compiler from moving ordinary accesses to memory across: what CUTLASS waits for
// asynchronous copies with does not say that it is about memory.
__device__ inline void compiler_fence() { asm volatile("" ::: "memory"); }

}  // namespace flash
