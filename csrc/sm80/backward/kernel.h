// Attention backward for GPUs with mma.sync and cp.async: a CTA computes dK and dV of one KV block,
// over the query heads that share it, or over one GQA split, and all rows that see it, and adds its
// part of dQ (FlashAttention-2, 2307.08691, algorithm 2, with transposed scores).
#pragma once

#include "core/dynamic_smem.h"
#include "core/tile_grid.h"
#include "sm80/backward/query_gradient.h"
#include "sm80/backward/row_loader.h"
#include "sm80/backward/scores.h"
#include "sm80/backward/store.h"

namespace flash::sm80 {

// This thread's index; with kAnew unknown to the optimiser, which would otherwise keep where it
// reads dQ's operands across the loop over rows, and spill.
template <bool kAnew>
__device__ __forceinline__ int thread_index() {
  int thread = threadIdx.x;
  if constexpr (kAnew) {
    asm volatile("" : "+r"(thread));
  }
  return thread;
}

// All functions of an iteration are forced inline: only then are its accumulators registers, and
// the largest tiles are where the compiler would rather not inline.

// Adds keys · rowsᵀ to a tile of keys x one pass's rows, over the depth of this thread's split.
// keys: K or V; rows: Q or dO
template <class Config, int kDepth, class Sum>
__device__ __forceinline__ void multiply_keys(typename Config::Element const* keys,
                                              typename Config::Element const* rows, int begin,
                                              SplitThread<Config> const& own, Sum& sum) {
  using Grid = typename Config::ScoreGrid;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN;
  // A split is whole runs of columns, and a run lies after the one before.
  keys += own.split * kDepth * kN;
  rows += own.split * kDepth * kM;
  multiply<Grid, kDepth>(operand_a<Grid, Along, kN, kDepth>(keys, own.thread),
                         operand_b<Grid, Along, kM, kDepth>(rows, own.thread, begin), sum);
}

// Computes P and dS of one pass's columns, in shared memory or added to dV and dK at once.
template <bool kMasked, class Config>
__device__ __forceinline__ void score_pass(RowLoader<Config> const& loader, RowIteration at,
                                           int stage, int pass, KeyGradients<Config>& sum) {
  using Grid = typename Config::ScoreGrid;
  using Element = typename Config::Element;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN, kColumns = Config::kPassM;
  constexpr int kDim = Config::kHeadDim, kDimV = Config::kHeadDimV;
  SplitThread<Config> const own;
  int const begin = pass * kColumns;
  auto& smem = loader.smem;
  ScoreTile<kMasked, Config> tile(loader.p, loader.block, smem.stats[stage], at, pass);

  Tensor s = zeros<Grid, kN, kColumns>();  // (MMA, MMA_N, MMA_M)
  multiply_keys<Config, Config::kDepth>(smem.k.data(), smem.q[stage].data(), begin, own, s);
  Tensor factors = tile.probabilities(s);
  Tensor p = convert<Element>(s);
  if constexpr (Config::kExchangeP) {
    store_accumulators<Grid, kN, kM>(p, smem.p, own.thread, begin);
  } else {
    multiply_registers<Grid>(
        make_tensor(p.data(), as_operand_a(p.layout())),
        operand_b<Grid, Across, kM, kDimV>(smem.dout[stage].data(), own.thread, begin), sum.dv);
  }

  Tensor dp = accumulators<Grid, kN, kColumns>();
  tile.start_gradients(dp);
  multiply_keys<Config, Config::kDepthV>(smem.v.data(), smem.dout[stage].data(), begin, own, dp);
  tile.score_gradients(dp, factors);
  Tensor ds = convert<Element>(dp);
  store_accumulators<Grid, kN, kM>(ds, smem.ds.data(), own.thread, begin);
  if constexpr (!Config::kExchangeP) {
    multiply_registers<Grid>(
        make_tensor(ds.data(), as_operand_a(ds.layout())),
        operand_b<Grid, Across, kM, kDim>(smem.q[stage].data(), own.thread, begin), sum.dk);
  }
}

// The same with depth splits: all columns at once, in shared memory.
template <bool kMasked, class Config>
__device__ __forceinline__ void score_depth_splits(RowLoader<Config> const& loader, RowIteration at,
                                                   int stage) {
  using Grid = typename Config::ScoreGrid;
  using Element = typename Config::Element;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN;
  SplitThread<Config> const own;
  auto& smem = loader.smem;
  ScoreTile<kMasked, Config> tile(loader.p, loader.block, smem.stats[stage], at, 0);
  Tensor s = zeros<Grid, kN, kM>(), dp = zeros<Grid, kN, kM>();
  if (own.split == 0) {
    tile.start_gradients(dp);
  }
  multiply_keys<Config, Config::kDepth>(smem.k.data(), smem.q[stage].data(), 0, own, s);
  multiply_keys<Config, Config::kDepthV>(smem.v.data(), smem.dout[stage].data(), 0, own, dp);
  smem.tell(own, s);
  smem.tell(own, dp, Config::kScoreNumbers);
  __syncthreads();
  if (own.split > 0) {
    return;
  }
  smem.add_others(own, s);
  smem.add_others(own, dp, Config::kScoreNumbers);
  Tensor factors = tile.probabilities(s);
  store_accumulators<Grid, kN, kM>(convert<Element>(s), smem.p, own.thread);
  tile.score_gradients(dp, factors);
  store_accumulators<Grid, kN, kM>(convert<Element>(dp), smem.ds.data(), own.thread);
}

// dQ = dS·K, in parts of the columns, to save registers.
template <class Config>
__device__ __forceinline__ void query_gradients(RowLoader<Config> const& loader, RowIteration at) {
  using Grid = typename Config::RowGrid;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN, kDim = Config::kHeadDim;
  constexpr int kColumns = kDim / Config::kQueryPasses;
  auto& smem = loader.smem;
  QueryGradient<Config> const sum(loader.p, loader.block, at);
  sum.wait();
#pragma unroll
  for (int pass = 0; pass < Config::kQueryPasses; ++pass) {
    int const thread = thread_index<Config::kFindsOperandsAnew>();
    Tensor dq = zeros<Grid, kM, kColumns>();
    multiply<Grid, kN>(operand_a<Grid, Across, kN, kM>(smem.ds.data(), thread),
                       operand_b<Grid, Across, kN, kDim>(smem.k.data(), thread, 0, pass * kColumns),
                       dq);
    if (loader.p.workspace.dq) {
      sum.add(dq, pass);
    } else {
      store_query_gradient(loader.p, loader.block, at, dq, pass);
    }
  }
  sum.pass_on();
}

// dV += Pᵀ·dO and dK += dSᵀ·Q, all operands in shared memory.
template <class Config>
__device__ __forceinline__ void add_key_gradients(SharedStorage<Config>& smem, int stage,
                                                  KeyGradients<Config>& sum) {
  using Grid = typename Config::KeyGrid;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN;
  constexpr int kDim = Config::kHeadDim, kDimV = Config::kHeadDimV;
  int const thread = threadIdx.x;
  multiply<Grid, kM>(operand_a<Grid, Along, kN, kM>(smem.p, thread),
                     operand_b<Grid, Across, kM, kDimV>(smem.dout[stage].data(), thread), sum.dv);
  multiply<Grid, kM>(operand_a<Grid, Along, kN, kM>(smem.ds.data(), thread),
                     operand_b<Grid, Across, kM, kDim>(smem.q[stage].data(), thread), sum.dk);
}

// One row block: P and dS from the scores again, then the three gradients. `prefetch` loads the
// next row block; it is called as soon as the buffers for that are free.
template <bool kMasked, class Config, class Prefetch>
__device__ __forceinline__ void iterate(RowLoader<Config> const& loader, RowIteration at, int stage,
                                        KeyGradients<Config>& sum, Prefetch prefetch) {
  if constexpr (Config::kStages > 1) {
    prefetch();
  }
  if constexpr (Config::kDepthSplits > 1) {
    score_depth_splits<kMasked>(loader, at, stage);
  } else {
#pragma unroll
    for (int pass = 0; pass < Config::kScorePasses; ++pass) {
      score_pass<kMasked>(loader, at, stage, pass, sum);
    }
  }
  __syncthreads();
  if constexpr (Config::kExchangeP) {
    add_key_gradients(loader.smem, stage, sum);
  }
  if constexpr (Config::kStages == 1) {
    // With one buffer each, the next Q and dO arrive under dQ's product only.
    if constexpr (Config::kExchangeP) {
      __syncthreads();
    }
    prefetch();
  }
  if (loader.p.dq.ptr) {
    query_gradients(loader, at);
  }
}

// The iterations of a tile: row blocks of all query heads of the GQA split, head by head.
template <class Config>
struct RowWalk {
  KeyBlock<Config> const& block;
  int head = 0;
  int step = 0;
  int stage = 0;

  __device__ bool valid() const { return head < block.heads; }
  __device__ bool masked() const { return step < block.range.masked_count(); }
  __device__ RowIteration iteration() const { return {head, block.range.block_at(step)}; }

  __device__ void next() {
    stage = (stage + 1) % Config::kStages;
    if (++step == block.range.count()) {
      step = 0;
      ++head;
    }
  }
};

// Waits for this iteration's rows; the next ones' load starts inside.
template <bool kMasked, class Config>
__device__ __forceinline__ void iterate_and_prefetch(RowLoader<Config> const& loader,
                                                     RowWalk<Config>& walk,
                                                     KeyGradients<Config>& sum) {
  RowIteration const at = walk.iteration();
  int const stage = walk.stage;
  loader.wait();
  walk.next();
  iterate<kMasked>(loader, at, stage, sum, [&] {
    if (walk.valid()) {
      loader.load_rows(walk.iteration(), walk.stage);
    }
  });
}

template <class Config>
__device__ void backward_key_block(BwdParams const& p, KeyBlock<Config> const& block,
                                   SharedStorage<Config>& smem) {
  KeyGradients<Config> sum;
  if (block.range.count() > 0) {
    RowLoader<Config> const loader{block, p, smem};
    RowWalk<Config> walk{block};
    loader.load_keys();
    loader.load_rows(walk.iteration(), 0);
    while (walk.valid()) {
      // Two loops: in a single loop, the condition around the mask code becomes selects in every
      // iteration.
      while (walk.valid() && walk.masked()) {
        iterate_and_prefetch<true>(loader, walk, sum);
      }
      while (walk.valid() && !walk.masked()) {
        iterate_and_prefetch<false>(loader, walk, sum);
      }
    }
    __syncthreads();
  }
  store_key_gradients(p, block, smem, sum);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    backward_kernel(__grid_constant__ BwdParams const p, __grid_constant__ TileGrid const grid) {
  auto& smem = *reinterpret_cast<SharedStorage<Config>*>(dynamic_smem());
  auto& block = *reinterpret_cast<KeyBlock<Config>*>(smem.block);
  if (threadIdx.x == 0) {
    WorkTile const tile = grid.tile(p.seqlens.cu_k, p.seqlens.batch, p.seqlens.total_k, blockIdx.x);
    if (tile.valid) {
      block = KeyBlock<Config>(p, tile);
    } else {
      block.tile.valid = false;
    }
  }
  __syncthreads();
  if (block.tile.valid) {
    backward_key_block<Config>(p, block, smem);
  }
}

}  // namespace flash::sm80
