// The two matrix products: S = Q·Kᵀ and O += P·V.
#pragma once

#include "sm80/forward/config.h"
#include "sm80/forward/row_block.h"

namespace flash::sm80 {

// S = Q·Kᵀ (kBlockM, kBlockN). The loop is unrolled whole, so the compiler reads operands as far
// ahead as registers allow; doing it by hand gained nothing.
template <class Config>
__device__ auto scores(SharedStorage<Config>& smem, int thread) {
  using Element = typename Config::Element;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN, kD = Config::kHeadDim;
  typename Config::TiledMma mma;
  Tensor s = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});
  clear(s);

  Tensor sQ = make_tensor(make_smem_ptr(smem.q.data()), typename Config::SmemLayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(smem.k.data()), typename Config::SmemLayoutK{});
  Tensor rQ = make_tensor<Element>(partition_shape_A(mma, Shape<Int<kM>, Int<kD>>{}));
  Tensor rK = make_tensor<Element>(partition_shape_B(mma, Shape<Int<kN>, Int<kD>>{}));
  auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  auto copy_k = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  auto thread_q = copy_q.get_slice(thread);
  auto thread_k = copy_k.get_slice(thread);
  Tensor from_q = thread_q.partition_S(sQ);
  Tensor from_k = thread_k.partition_S(sK);
  Tensor to_q = thread_q.retile_D(rQ);
  Tensor to_k = thread_k.retile_D(rK);

  constexpr int kSteps = kD / 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    copy(copy_q, from_q(_, _, step), to_q(_, _, step));
    copy(copy_k, from_k(_, _, step), to_k(_, _, step));
    gemm(mma, rQ(_, _, step), rK(_, _, step), s);
  }
  return s;
}

// O += P·V, P already in operand registers (MMA, MMA_M, kBlockN / 16)
template <class Config, class OperandP, class Out>
__device__ void add_values(SharedStorage<Config>& smem, int thread, OperandP const& p, Out& out) {
  using Element = typename Config::Element;
  constexpr int kN = Config::kBlockN, kD = Config::kHeadDimV;
  typename Config::TiledMma mma;
  Tensor sVt = make_tensor(make_smem_ptr(smem.v.data()), typename Config::SmemLayoutVt{});
  Tensor rV = make_tensor<Element>(partition_shape_B(mma, Shape<Int<kD>, Int<kN>>{}));
  auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, Element>{}, mma);
  auto thread_v = copy_v.get_slice(thread);
  Tensor from_v = thread_v.partition_S(sVt);
  Tensor to_v = thread_v.retile_D(rV);

  constexpr int kSteps = kN / 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    copy(copy_v, from_v(_, _, step), to_v(_, _, step));
    gemm(mma, p(_, _, step), rV(_, _, step), out);
  }
}

}  // namespace flash::sm80
