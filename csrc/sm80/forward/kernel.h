// Attention forward for GPUs with mma.sync and cp.async: a CTA computes one row block against all
// the keys that it sees (FlashAttention-2, 2307.08691, algorithm 1).
#pragma once

#include "core/dynamic_smem.h"
#include "core/max_logits.h"
#include "core/score_fragments.h"
#include "core/tile_grid.h"
#include "sm80/forward/key_loader.h"
#include "sm80/forward/products.h"
#include "sm80/store_accumulators.h"

namespace flash::sm80 {

// O = P·V accumulators and what is needed to finish them.
template <class Config>
struct Accumulators {
  static constexpr int kRows = 2 * Config::kBlockM / (16 * Config::kRowWarps);
  decltype(zeros<typename Config::Grid, Config::kBlockM, Config::kColumns>()) out;
  OnlineSoftmax<kRows> softmax;

  __device__ explicit Accumulators(float softmax_scale) : softmax(softmax_scale * kLog2e) {
    clear(out);
  }

  __device__ void rescale(float const (&factor)[kRows]) {
    scale_rows(make_tensor(out.data(), rows_and_columns(out.layout())), factor);
  }
};

// The largest logits of a thread's rows and of their head, for calls that ask for them. They lie in
// shared memory, because registers are all in use; for the same reason an index is found anew at
// each use, and whether the call asks is read from there: d 128 spills 72 bytes with the parameter.
// All lanes of a row have the same maximum, so each finds its own. Plain kernels do not serve such
// calls.
template <class Config>
struct KeepMaxLogits {
  RowBlock<Config> const& block;
  SharedStorage<Config>& smem;

  __device__ bool wanted() const {
    return Config::kScores != ScoreLevel::Plain && SplitThread<Config>{}.split == 0 &&
           block.keeps_max_logits;
  }
  __device__ int& of(int r) const {
    unsigned index = SplitThread<Config>{}.thread;
    asm volatile("" : "+r"(index));
    return smem.maxima[index / 4 * Accumulators<Config>::kRows + r];
  }

  __device__ void begin() const {
#pragma unroll 1
    for (int r = 0; wanted() && r < Accumulators<Config>::kRows; ++r) {
      of(r) = bits_in_order(-INFINITY);
    }
  }

  __device__ void operator()(int r, float top) const {
    if (wanted()) {
      atomicMax(&of(r), bits_in_order(top));
    }
  }

  // After the last score of row r, whose LSE is there. One lane of the row calls it.
  __device__ void finish(int r, float* lse, float row_lse, Accumulators<Config> const& acc) const {
    if (wanted()) {
      float const top = from_bits_in_order(of(r));
      float const logit =
          max_logit(acc.softmax.saw_key(r), top, block.score_mod.exponent_scale(), row_lse);
      if (block.max_logits.of_heads) {
        of(r) = bits_in_order(logit);
      } else {
        lse[block.max_logits.to_row] = logit;
      }
    }
  }

  // After a barrier that all rows have been finished before.
  __device__ void finish_head(FragmentCoord<Config::kRowWarps> const& coord) const {
    if (wanted() && block.max_logits.of_heads) {
      int most = bits_in_order(-INFINITY);
#pragma unroll 1
      for (int r = 0; r < Accumulators<Config>::kRows; ++r) {
        most = coord.row(r) < block.rows ? max(most, of(r)) : most;
      }
      raise_logit_of_warp(block.max_logits.of_heads, most);
    }
  }
};

// One KV block: scores, mask if it needs one, softmax, values. Returns the next one.
template <class Config>
__device__ int attend(KeyLoader<Config> const& loader, int key_block, Accumulators<Config>& acc) {
  using Acc = Accumulators<Config>;
  SplitThread<Config> const own;
  loader.wait();
  loader.load_v(key_block);
  Tensor s_mma = scores(loader.smem, own);
  if constexpr (Config::kDepthSplits > 1) {
    loader.smem.tell(own, s_mma);
  }
  loader.wait();
  RowBlock<Config> const& block = loader.block;
  int const next_block = block.range.after(key_block);
  loader.load_k(next_block);
  if constexpr (Config::kDepthSplits > 1) {
    loader.smem.add_others(own, s_mma);
  }

  Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
  FragmentCoord<Config::kRowWarps> const coord(own.thread);
  int const key_begin = key_block * Config::kBlockN;
  if constexpr (Config::kScores == ScoreLevel::Full) {
    apply_score_mod</*kCapByCase=*/true>(s, block.score_mod, block.row_begin, key_begin, coord);
  }
  if (block.range.masked(key_block)) {
    auto const query_of = [&](int row) { return block.row_begin + row; };
    apply_mask(s, block.mask, query_of, key_begin, coord);
    if constexpr (Config::kPaged) {
      if (block.pages_missing) {
        hide_missing(s, block, key_begin, coord);
      }
    }
  }
  float factor[Acc::kRows];
  KeepMaxLogits<Config> const tops{block, loader.smem};
  bool const moves =
      acc.softmax.template raise<size<1>(s)>(s, factor, QuadReduce{}, NoOffsets{}, tops);
  if_any_in_warp(moves, [&] {
    acc.softmax.rescale(factor);
    acc.rescale(factor);
  });
  acc.softmax.template exponentials<size<1>(s)>(s);
  if constexpr (Config::kScores == ScoreLevel::Full) {
    if (loader.p.scores.dropout_p > 0.f) {
      DropoutMask const mask(loader.p.scores, block.tile.batch, loader.p.heads_q, block.tile.head);
      apply_dropout(s, mask, block.row_begin, key_begin, coord);
    }
  }
  Tensor p = convert<typename Config::Element>(s_mma);
  Tensor p_operand = make_tensor(p.data(), as_operand_a(p.layout()));
  add_values(loader.smem, own, p_operand, acc.out);
  return next_block;
}

// Divides by the softmax denominator and writes O [rows, head_dim], LSE [rows] and, for calls that
// ask for them, largest logits.
template <class Config>
__device__ void store(FwdParams const& p, RowBlock<Config> const& block,
                      SharedStorage<Config>& smem, Accumulators<Config>& acc) {
  using Element = typename Config::Element;
  using Acc = Accumulators<Config>;
  SplitThread<Config> const own;
  FragmentCoord<Config::kRowWarps> const coord(own.thread);
  float const keep_scale =
      Config::kScores == ScoreLevel::Full ? reciprocal_fast(1.f - p.scores.dropout_p) : 1.f;
  KeepMaxLogits<Config> const largest{block, smem};
  float scale[Acc::kRows];
#pragma unroll
  for (int r = 0; r < Acc::kRows; ++r) {
    auto const row = acc.softmax.finish(r, block.sink, QuadReduce{});
    scale[r] = row.out_scale * keep_scale;
    if (own.split == 0 && own.thread % 4 == 0 && coord.row(r) < block.rows) {
      block.lse[coord.row(r)] = row.lse;
      largest.finish(r, &block.lse[coord.row(r)], row.lse, acc);
    }
  }
  acc.rescale(scale);

  store_accumulators<typename Config::Grid, Config::kBlockM, Config::kColumns>(
      convert<Element>(acc.out), smem.out.data() + own.split * Config::kColumns * Config::kBlockM,
      own.thread);
  __syncthreads();
  store_tile<Config::kBlockM, Config::kHeadDimV, Config::kThreads>(
      block.out, p.out.row_stride, smem.out.data(), block.rows, p.head_dim_v, threadIdx.x);
  largest.finish_head(coord);
}

template <class Config>
__device__ void forward_row_block(FwdParams const& p, RowBlock<Config> const& block,
                                  SharedStorage<Config>& smem) {
  Accumulators<Config> acc(Config::kScores == ScoreLevel::Plain ? p.scores.softmax_scale
                                                                : block.score_mod.exponent_scale());
  BlockRange const& range = block.range;
  KeepMaxLogits<Config>{block, smem}.begin();
  if (range.count() > 0) {
    KeyLoader<Config> const loader{block, p, smem};
    load_tile<Config::kBlockM, Config::kHeadDim, Config::kThreads>(
        block.q, p.q.row_stride, smem.q.data(), block.rows, p.head_dim, threadIdx.x);
    int key_block = range.block_at(0);
    loader.load_k(key_block);
    while (key_block != BlockRange::kNone) {
      key_block = attend(loader, key_block, acc);
    }
  }
  store(p, block, smem, acc);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    forward_kernel(__grid_constant__ FwdParams const p, __grid_constant__ TileGrid const grid) {
  auto& smem = *reinterpret_cast<SharedStorage<Config>*>(dynamic_smem());
  auto& block = *reinterpret_cast<RowBlock<Config>*>(smem.block);
  if (threadIdx.x == 0) {
    WorkTile const tile = grid.tile(p.seqlens, blockIdx.x);
    if (tile.valid) {
      block = RowBlock<Config>(p, tile);
    } else {
      block.tile.valid = false;
    }
  }
  __syncthreads();
  if (block.tile.valid) {
    if constexpr (Config::kPaged) {
      find_missing_pages(block);
    }
    forward_row_block<Config>(p, block, smem);
  }
}

}  // namespace flash::sm80
