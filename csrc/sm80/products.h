// Matrix products: C += A·B with A and B in shared memory, or A in registers.
#pragma once

#include "sm80/tensor_core.h"

namespace flash::sm80 {

// How an operand lies in shared memory: its reduction runs along the rows of memory, or across.
using Along = SM75_U32x4_LDSM_N;
using Across = SM75_U16x8_LDSM_T;

// c (M, N) += a (M, K) · b (N, K)ᵀ. The loop is unrolled whole, so the compiler reads operands as
// far ahead as registers allow.
template <class Mma, class CopyA, class CopyB, class A, class B, class C>
__device__ __forceinline__ void multiply(CopyA, CopyB, A const& a, B const& b, C& c) {
  using Element = typename A::value_type;
  Mma mma;
  int const thread = threadIdx.x;
  Tensor ra = make_tensor<Element>(partition_shape_A(mma, shape(a)));
  Tensor rb = make_tensor<Element>(partition_shape_B(mma, shape(b)));
  auto copy_a = make_tiled_copy_A(Copy_Atom<CopyA, Element>{}, mma).get_slice(thread);
  auto copy_b = make_tiled_copy_B(Copy_Atom<CopyB, Element>{}, mma).get_slice(thread);
  Tensor from_a = copy_a.partition_S(a);
  Tensor from_b = copy_b.partition_S(b);
  Tensor to_a = copy_a.retile_D(ra);
  Tensor to_b = copy_b.retile_D(rb);
#pragma unroll
  for (int step = 0; step < size<2>(ra); ++step) {
    copy(Copy_Atom<CopyA, Element>{}, from_a(_, _, step), to_a(_, _, step));
    copy(Copy_Atom<CopyB, Element>{}, from_b(_, _, step), to_b(_, _, step));
    gemm(mma, ra(_, _, step), rb(_, _, step), c);
  }
}

// The same with a already in operand registers (MMA, MMA_M, K / 16). thread: of Mma's.
template <class Mma, class CopyB, class A, class B, class C>
__device__ __forceinline__ void multiply_registers(CopyB, A const& a, B const& b, int thread,
                                                   C& c) {
  using Element = typename B::value_type;
  Mma mma;
  Tensor rb = make_tensor<Element>(partition_shape_B(mma, shape(b)));
  auto copy_b = make_tiled_copy_B(Copy_Atom<CopyB, Element>{}, mma).get_slice(thread);
  Tensor from_b = copy_b.partition_S(b);
  Tensor to_b = copy_b.retile_D(rb);
#pragma unroll
  for (int step = 0; step < size<2>(rb); ++step) {
    copy(Copy_Atom<CopyB, Element>{}, from_b(_, _, step), to_b(_, _, step));
    gemm(mma, a(_, _, step), rb(_, _, step), c);
  }
}

template <class SmemLayout, class Element>
__device__ auto smem_tensor(Element* data, SmemLayout layout) {
  return make_tensor(make_smem_ptr(data), layout);
}

// A thread's zeroed accumulators of a (kM, kN) tile.
template <class Mma, int kM, int kN>
__device__ auto zeros() {
  Tensor c = partition_fragment_C(Mma{}, Shape<Int<kM>, Int<kN>>{});
  clear(c);
  return c;
}

}  // namespace flash::sm80
