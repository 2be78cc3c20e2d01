// The two matrix products: S = Q·Kᵀ and O += P·V.
#pragma once

#include "sm80/forward/row_block.h"
#include "sm80/operand.h"

namespace flash::sm80 {

// kTiles operands of kWords registers each, read two (B) or one (A) at a time.
template <class Element, int kWords, int kTiles>
struct Operands {
  uint32_t words[kTiles][kWords];

  // (2 * kWords elements, kTiles), as gemm takes them
  __device__ auto tensor() {
    return make_tensor(reinterpret_cast<Element*>(words),
                       Layout<Shape<Int<2 * kWords>, Int<kTiles>>>{});
  }
};

// S = Q·Kᵀ (kBlockM, kBlockN). The loop is unrolled whole, so the compiler reads operands as far
// ahead as registers allow; doing it by hand gained nothing.
template <class Config>
__device__ auto scores(SharedStorage<Config>& smem, int thread) {
  using Element = typename Config::Element;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN, kD = Config::kHeadDim;
  constexpr int kTilesM = kM / (16 * Config::kWarps);
  typename Config::TiledMma mma;
  Tensor s = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});
  clear(s);
  OperandReader<Element, kM, kD> const from_q(smem.q.data(), lanes_of_a(thread));
  OperandReader<Element, kN, kD> const from_k(smem.k.data(), lanes_of_b(thread));
#pragma unroll
  for (int d = 0; d < kD; d += 16) {
    Operands<Element, 4, kTilesM> q;
    Operands<Element, 2, kN / 8> k;
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      from_q.template read<SM75_U32x4_LDSM_N>(m * 16 * Config::kWarps, d, q.words[m]);
    }
#pragma unroll
    for (int n = 0; n < kN; n += 16) {
      from_k.template read<SM75_U32x4_LDSM_N>(n, d, k.words[n / 8]);
    }
    gemm(mma, q.tensor(), k.tensor(), s);
  }
  return s;
}

// O += P·V, P already in operand registers (MMA, MMA_M, kBlockN / 16)
template <class Config, class OperandP, class Out>
__device__ void add_values(SharedStorage<Config>& smem, int thread, OperandP const& p, Out& out) {
  using Element = typename Config::Element;
  constexpr int kN = Config::kBlockN, kD = Config::kHeadDimV;
  typename Config::TiledMma mma;
  OperandReader<Element, kN, kD> const from_v(smem.v.data(), lanes_of_b_transposed(thread));
#pragma unroll
  for (int n = 0; n < kN; n += 16) {
    Operands<Element, 2, kD / 8> v;
#pragma unroll
    for (int d = 0; d < kD; d += 16) {
      from_v.template read<SM75_U16x8_LDSM_T>(n, d, v.words[d / 8]);
    }
    gemm(mma, p(_, _, n / 16), v.tensor(), out);
  }
}

}  // namespace flash::sm80
