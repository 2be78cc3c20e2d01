// The two matrix products: S = Q·Kᵀ and O += P·V.
#pragma once

#include "sm80/forward/row_block.h"
#include "sm80/products.h"

namespace flash::sm80 {

// S = Q·Kᵀ (kBlockM, kBlockN)
template <class Config>
__device__ auto scores(SharedStorage<Config>& smem, int thread) {
  using Grid = typename Config::Grid;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN, kD = Config::kHeadDim;
  Tensor s = zeros<Grid, kM, kN>();
  multiply<Grid, kD>(operand_a<Grid, Along, kM, kD>(smem.q.data(), thread),
                     operand_b<Grid, Along, kN, kD>(smem.k.data(), thread), s);
  return s;
}

// O += P·V, P already in operand registers (MMA, MMA_M, kBlockN / 16)
template <class Config, class OperandP, class Out>
__device__ void add_values(SharedStorage<Config>& smem, int thread, OperandP const& p, Out& out) {
  using Grid = typename Config::Grid;
  constexpr int kN = Config::kBlockN, kD = Config::kHeadDimV;
  multiply_registers<Grid>(p, operand_b<Grid, Across, kN, kD>(smem.v.data(), thread), out);
}

}  // namespace flash::sm80
