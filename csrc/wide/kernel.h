// Attention of few query rows against a cache where O has up to 512 columns. Work is cut and merged
// as decode's (decode/kernel.h); here all warps of a CTA have the same keys, because one warp has
// no registers for all columns of O. In latent attention (MLA, DeepSeek-AI 2024, arXiv:2405.04434)
// a key is its value and more columns, so that a cache's rows are read once for both products.
#pragma once

#include "core/dynamic_smem.h"
#include "decode/find_work.h"
#include "decode/piece_merge.h"
#include "wide/attention.h"
#include "wide/store.h"

namespace flash::wide {

// Stores the rows: those of the piece, or if there is one piece O and LSE.
template <class Config>
__device__ void store_rows(DecodeOutput<Config> const& output, WideStorage<Config>& smem, int warp,
                           int lane, WideAccumulators<Config>& acc) {
  FragmentCoord<1> const coord(lane);
  int const rows = output.work.tile.rows, col = warp * Config::kWarpColumns;
  __syncthreads();  // all warps are done with the keys, which lie in the same memory
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    auto const row = acc.softmax.finish(r, output.sink(coord.row(r)), QuadReduce{});
    factor[r] = row.out_scale;
    if (warp == 0 && coord.col0 == 0 && coord.row(r) < rows) {
      output.store_lse(coord.row(r), row.lse);
    }
  }
  scale_rows(acc.rows(), factor);
  Tensor o = acc.rows();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < size<1>(o); c += 2) {
      *reinterpret_cast<float2*>(&smem.out[coord.row(r)][col + coord.col(c)]) = {o(r, c),
                                                                                 o(r, c + 1)};
    }
  }
  __syncthreads();
  store_out(output, smem.out, [](int /*row*/) { return 1.f; });
  __syncthreads();  // merging takes the same memory
}

template <class Config>
__device__ __forceinline__ void wide_piece(DecodeParams const& p) {
  auto& smem = *reinterpret_cast<WideStorage<Config>*>(dynamic_smem());
  auto& work = *reinterpret_cast<DecodeWork<Config>*>(smem.work);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    find_work(p, PieceShare{0}, work);
  }
  __syncthreads();
  if (!work.piece.valid) {
    return;
  }
  // With score mods, scores are scaled before the softmax.
  constexpr bool kScaled = Config::kScores == ScoreLevel::Full;
  WideAccumulators<Config> acc(kScaled ? 1.f : p.fwd.scores.softmax_scale);
  attend(p, work, smem, warp, lane, acc);
  using Output = DecodeOutput<Config>;
  bool const cut = work.piece.count > 1;
  store_rows(Output{p, work, cut ? work.piece.number : Output::kWhole}, smem, warp, lane, acc);
  if (cut) {
    merge_pieces(p, work, smem.pieces);
  }
}

// An SM has shared memory for one CTA of the larger tile, which may have all registers;
// without the 1, ptxas allots half of them, and spills.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    wide_kernel(__grid_constant__ DecodeParams const p) {
  wide_piece<Config>(p);
}

}  // namespace flash::wide
