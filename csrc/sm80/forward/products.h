// The two matrix products: S = Q·Kᵀ and O += P·V.
#pragma once

#include "sm80/forward/row_block.h"
#include "sm80/products.h"

namespace flash::sm80 {

// S = Q·Kᵀ (kBlockM, kBlockN), over the depth of this thread's split
template <class Config>
__device__ auto scores(SharedStorage<Config>& smem, SplitThread<Config> const& own) {
  using Grid = typename Config::Grid;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN, kD = Config::kDepth;
  Tensor s = zeros<Grid, kM, kN>();
  // A split is whole runs of columns, and a run lies after the one before.
  auto const* const q = smem.q.data() + own.split * kD * kM;
  auto const* const k = smem.k.data() + own.split * kD * kN;
  multiply<Grid, kD>(operand_a<Grid, Along, kM, kD>(q, own.thread),
                     operand_b<Grid, Along, kN, kD>(k, own.thread), s);
  return s;
}

// O += P·V of the columns of this thread's split, P already in operand registers (MMA, MMA_M,
// kBlockN / 16)
template <class Config, class OperandP, class Out>
__device__ void add_values(SharedStorage<Config>& smem, SplitThread<Config> const& own,
                           OperandP const& p, Out& out) {
  using Grid = typename Config::Grid;
  constexpr int kN = Config::kBlockN, kColumns = Config::kColumns;
  auto const* const v = smem.v.data() + own.split * kColumns * kN;
  multiply_registers<Grid>(p, operand_b<Grid, Across, kN, kColumns>(v, own.thread), out);
}

}  // namespace flash::sm80
