// Attention forward for GPUs with mma.sync and cp.async: one thread block computes one block of
// query rows against all the keys they see (FlashAttention-2, 2307.08691, algorithm 1).
#pragma once

#include "core/block_info.h"
#include "core/block_range.h"
#include "core/mask.h"
#include "core/softmax.h"
#include "core/tile_grid.h"
#include "params/fwd_params.h"
#include "sm80/config.h"
#include "sm80/copy_tile.h"
#include "sm80/fragments.h"

namespace flash::sm80 {

// Everything about one row block that stays the same while its keys go by.
template <class Config>
struct RowBlock {
  using Element = typename Config::Element;

  WorkTile tile;
  BlockInfo info;
  SequenceMask mask;
  BlockRange range;
  int row_begin;
  int rows;          // of the kBlockM that exist
  Element const* q;  // first row of this block
  Element const* k;  // first key of the sequence
  Element const* v;
  Element* out;  // first row of this block
  float* lse;

  __device__ RowBlock(FwdParams const& p, WorkTile const& tile_)
      : tile(tile_),
        info(p.seqlens, tile_.batch),
        mask(p.mask, info.seqlen_q, info.seqlen_k),
        row_begin(tile_.m_block * Config::kBlockM),
        rows(min(info.seqlen_q - row_begin, Config::kBlockM)) {
    range = block_range(mask, row_begin, row_begin + rows, Config::kBlockN);
    int const batch = tile.batch, head = tile.head;
    int const head_kv = head / (p.heads_q / p.heads_kv);
    int64_t const row = info.row_q + row_begin;
    q = static_cast<Element const*>(p.q.ptr) + p.q.offset(batch, row, head);
    k = static_cast<Element const*>(p.k.ptr) + p.k.offset(batch, info.row_k, head_kv);
    v = static_cast<Element const*>(p.v.ptr) + p.v.offset(batch, info.row_k, head_kv);
    out = static_cast<Element*>(p.out.ptr) + p.out.offset(batch, row, head);
    lse = p.lse.at(batch, row, head);
  }
};

template <class Config>
struct SharedStorage {
  using Element = typename Config::Element;
  // Q, and after the last product O: each warp overwrites only the rows that it alone read.
  alignas(128) array_aligned<Element, cosize_v<typename Config::SmemLayoutQ>> q;
  alignas(128) array_aligned<Element, cosize_v<typename Config::SmemLayoutKV>> k;
  alignas(128) array_aligned<Element, cosize_v<typename Config::SmemLayoutKV>> v;
  // Here, read again at each use: kept in registers these two dozen words make the kernel spill.
  alignas(16) char block[sizeof(RowBlock<Config>)];
};

template <class Config>
constexpr int kSmemBytes = sizeof(SharedStorage<Config>);

// O = P·V accumulators and what is needed to finish them.
template <class Config>
struct Accumulators {
  static constexpr int kRows = 2 * Config::kBlockM / (16 * Config::kWarps);
  decltype(partition_fragment_C(typename Config::TiledMma{},
                                Shape<Int<Config::kBlockM>, Int<Config::kHeadDim>>{})) out;
  OnlineSoftmax<kRows> softmax;

  __device__ explicit Accumulators(float softmax_scale) : softmax(softmax_scale * kLog2e) {
    clear(out);
  }

  // out *= rescale, row by row
  __device__ void rescale(float const (&factor)[kRows]) {
    Tensor o = make_tensor(out.data(), rows_and_columns(out.layout()));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < size<1>(o); ++c) {
        o(r, c) *= factor[r];
      }
    }
  }
};

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
  Tensor sK = make_tensor(make_smem_ptr(smem.k.data()), typename Config::SmemLayoutKV{});
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
  constexpr int kN = Config::kBlockN, kD = Config::kHeadDim;
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

// Keys outside a row's limits get -inf.
template <class Config, class Scores>
__device__ void apply_mask(Scores& s, SequenceMask const& mask, int row_begin, int key_begin,
                           int thread) {
  FragmentCoord<Config> const coord(thread);
#pragma unroll
  for (int r = 0; r < size<0>(s); ++r) {
    KeyLimits const keys = mask.limits(row_begin + coord.row(r));
    int const begin = keys.begin - key_begin, end = keys.end - key_begin;
#pragma unroll
    for (int c = 0; c < size<1>(s); ++c) {
      int const col = coord.col(c);
      if (col < begin || col >= end) {
        s(r, c) = -INFINITY;
      }
    }
  }
}

// K and V have one buffer each: V is loaded under Q·Kᵀ, the next K under softmax and P·V. A second
// pair saves a barrier per step and was no faster (d 128: 354 against 372 TFLOP/s at 4k keys on an
// H200).
template <class Config>
struct KeyLoader {
  RowBlock<Config> const& block;
  FwdParams const& p;
  SharedStorage<Config>& smem;
  TileThread<Config> thread;

  __device__ void load_k(int step) const {
    if (step < block.range.count()) {
      load(block.k, p.k.row_stride, smem.k.data(), step);
    }
    cp_async_fence();
  }

  __device__ void load_v(int step) const {
    load(block.v, p.v.row_stride, smem.v.data(), step);
    cp_async_fence();
  }

  // What was loaded last has arrived, and everybody is done with the other buffer.
  __device__ void wait() const {
    cp_async_wait<0>();
    __syncthreads();
  }

 private:
  __device__ void load(typename Config::Element const* sequence, int64_t row_stride,
                       typename Config::Element* target, int step) const {
    int const first = block.range.block_at(step) * Config::kBlockN;
    load_tile<Config, Config::kBlockN>(sequence + first * row_stride, row_stride, target,
                                       typename Config::SmemLayoutKV{}, block.info.seqlen_k - first,
                                       p.head_dim, thread);
  }
};

// One key block: scores, mask if it needs one, softmax, values.
template <bool kMasked, class Config>
__device__ void attend(KeyLoader<Config> const& loader, int step, Accumulators<Config>& acc) {
  using Acc = Accumulators<Config>;
  int const thread = threadIdx.x;
  loader.wait();
  loader.load_v(step);
  Tensor s_mma = scores<Config>(loader.smem, thread);
  loader.wait();
  loader.load_k(step + 1);

  Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
  if constexpr (kMasked) {
    apply_mask<Config>(s, loader.block.mask, loader.block.row_begin,
                       loader.block.range.block_at(step) * Config::kBlockN, thread);
  }
  float rescale[Acc::kRows];
  acc.softmax.template step<size<1>(s)>(s, rescale, QuadReduce{});
  acc.rescale(rescale);
  Tensor p = convert<typename Config::Element>(s_mma);
  Tensor p_operand = make_tensor(p.data(), as_operand_a(p.layout()));
  add_values<Config>(loader.smem, thread, p_operand, acc.out);
}

// Divides by the softmax denominator and writes O [rows, head_dim] and LSE [rows].
template <class Config>
__device__ void store(FwdParams const& p, RowBlock<Config> const& block,
                      SharedStorage<Config>& smem, Accumulators<Config>& acc) {
  using Element = typename Config::Element;
  using Acc = Accumulators<Config>;
  int const thread = threadIdx.x;
  FragmentCoord<Config> const coord(thread);
  float scale[Acc::kRows];
#pragma unroll
  for (int r = 0; r < Acc::kRows; ++r) {
    auto const row = acc.softmax.finish(r, -INFINITY, QuadReduce{});
    scale[r] = row.out_scale;
    if (thread % 4 == 0 && coord.row(r) < block.rows) {
      block.lse[coord.row(r)] = row.lse;
    }
  }
  acc.rescale(scale);

  Tensor out = convert<Element>(acc.out);
  Tensor sO = make_tensor(make_smem_ptr(smem.q.data()), typename Config::SmemLayoutQ{});
  typename Config::TiledMma mma;
  auto copy_o = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, mma);
  auto thread_o = copy_o.get_slice(thread);
  copy(copy_o, thread_o.retile_S(out), thread_o.partition_D(sO));
  __syncthreads();
  store_tile<Config, Config::kBlockM>(block.out, p.out.row_stride, smem.q.data(),
                                      typename Config::SmemLayoutQ{}, block.rows, p.head_dim,
                                      TileThread<Config>(thread));
}

template <class Config>
__device__ void forward_row_block(FwdParams const& p, RowBlock<Config> const& block,
                                  SharedStorage<Config>& smem) {
  Accumulators<Config> acc(p.scores.softmax_scale);
  int const steps = block.range.count(), masked_steps = block.range.masked_count();
  if (steps > 0) {
    KeyLoader<Config> const loader{block, p, smem, TileThread<Config>(threadIdx.x)};
    load_tile<Config, Config::kBlockM>(block.q, p.q.row_stride, smem.q.data(),
                                       typename Config::SmemLayoutQ{}, block.rows, p.head_dim,
                                       loader.thread);
    loader.load_k(0);
    int step = 0;
    for (; step < masked_steps; ++step) {
      attend<true>(loader, step, acc);
    }
    for (; step < steps; ++step) {
      attend<false>(loader, step, acc);
    }
  }
  store(p, block, smem, acc);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    forward_kernel(__grid_constant__ FwdParams const p, __grid_constant__ TileGrid const grid) {
  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage<Config>*>(smem_bytes);
  auto& block = *reinterpret_cast<RowBlock<Config>*>(smem.block);
  if (threadIdx.x < 32) {
    WorkTile const tile = grid.tile(p.seqlens, blockIdx.x);
    if (threadIdx.x == 0) {
      if (tile.valid) {
        block = RowBlock<Config>(p, tile);
      } else {
        block.tile.valid = false;
      }
    }
  }
  __syncthreads();
  if (block.tile.valid) {
    forward_row_block<Config>(p, block, smem);
  }
}

}  // namespace flash::sm80
