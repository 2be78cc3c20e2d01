// The preprocess: what the main kernel reads of a row (row_stats.h), and zeros where it adds.
#pragma once

#include <algorithm>

#include "core/early_launch.h"
#include "core/mask.h"
#include "passes/backward/row_stats.h"

namespace flash {

constexpr int kPassThreads = 256;
constexpr int kChunk = 8;  // elements in 16 bytes

template <class Element>
struct alignas(16) Chunk {
  Element element[kChunk];
};

// Rows that a thread has at a time, so far apart that the CTA's threads have all rows between them.
// Their loads are all on their way before the first is used.
constexpr int kRowsTogether = 4;

// How a CTA's threads share rows: 16 bytes of a row each.
struct RowLanes {
  int per_row;
  int lane;
  int first;  // the thread's first row
  int step;   // from one of its rows to the next

  __device__ explicit RowLanes(int columns)
      : per_row(columns <= 8 * kChunk    ? 8
                : columns <= 16 * kChunk ? 16
                                         : 32),
        lane(threadIdx.x % per_row),
        first(threadIdx.x / per_row),
        step(kPassThreads / per_row) {}

  __device__ float sum(float x) const {
    for (int other = per_row / 2; other > 0; other /= 2) {
      x += __shfl_xor_sync(0xffffffffu, x, other);
    }
    return x;
  }
};

// This lane's part of the products of a thread's rows.
template <class Element>
struct PartialDots {
  float sum[kRowsTogether] = {};

  // Adds the products of a chunk of each row. a, b: the lane's chunk of the first row; exist: rows
  // from that one on.
  __device__ void add(Element const* a, int64_t a_stride, Element const* b, int64_t b_stride,
                      int exist, int step) {
    Chunk<Element> x[kRowsTogether] = {}, y[kRowsTogether] = {};
#pragma unroll
    for (int i = 0; i < kRowsTogether; ++i) {
      if (i * step < exist) {
        x[i] = *reinterpret_cast<Chunk<Element> const*>(a + i * step * a_stride);
        y[i] = *reinterpret_cast<Chunk<Element> const*>(b + i * step * b_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsTogether * kChunk; ++i) {
      sum[i / kChunk] +=
          float(x[i / kChunk].element[i % kChunk]) * float(y[i / kChunk].element[i % kChunk]);
    }
  }
};

// Whether some row of a row block sees a key.
__device__ inline bool sees_keys(BwdParams const& p, BlockInfo const& info, int row_begin,
                                 int block_m) {
  SequenceMask const mask(p.mask, info.seqlen_q, info.seqlen_k);
  int const row_last = std::min(row_begin + block_m, info.seqlen_q) - 1;
  return mask.begin(row_begin) < mask.end(row_last);
}

// Zeros the sums to which the main kernel adds. Where there are no sums it zeros rows of dq: the
// main kernel stores only rows that see a key. If the main kernel finishes sums itself, only row
// blocks that it does not reach need zeros.
template <class Element>
__device__ void zero_query_gradient(BwdParams const& p, QueryTile const& shape,
                                    WorkTile const& tile, BlockInfo const& info, int64_t row_block,
                                    bool is_sequence) {
  if (p.finishes_sums() && is_sequence &&
      sees_keys(p, info, tile.m_block * shape.block_m, shape.block_m)) {
    return;
  }
  if (!p.workspace.dq || p.finishes_sums() || !is_sequence) {
    int const row_begin = tile.m_block * shape.block_m;
    int const chunks = p.head_dim / kChunk,
              rows = std::min(info.seqlen_q - row_begin, shape.block_m);
    Element* const dq = static_cast<Element*>(p.dq.ptr) +
                        p.dq.offset(tile.batch, info.row_q + row_begin, tile.head);
    for (int i = threadIdx.x; i < rows * chunks; i += kPassThreads) {
      auto* const chunk = dq + i / chunks * p.dq.row_stride + i % chunks * kChunk;
      *reinterpret_cast<uint4*>(chunk) = {0, 0, 0, 0};
    }
    return;
  }
  int const size = shape.block_m * shape.head_dim;
  auto* const sums = reinterpret_cast<float4*>(p.workspace.dq + row_block * size);
#pragma unroll 4
  for (int i = threadIdx.x; i < size / 4; i += kPassThreads) {
    sums[i] = {0.f, 0.f, 0.f, 0.f};
  }
}

// Orders sequences, the one with most keys first, so that no long one is left when the others are
// done. Whatever the lengths are, each sequence comes once. A warp counts the place of one
// sequence.
__device__ inline void order_sequences(Seqlens const& s, int* order) {
  constexpr int kWarps = kPassThreads / 32;
  VarlenRows const keys{s.cu_k, s.batch, static_cast<int>(s.total_k)};
  int const count = VarlenRows::count(s.batch), lane = threadIdx.x % 32;
  for (int sequence = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32); sequence < count;
       sequence += static_cast<int>(gridDim.x * kWarps)) {
    int const length = keys.run(sequence).length;
    int before = 0;
    for (int other = lane; other < count; other += 32) {
      int const its = keys.run(other).length;
      before += its > length || (its == length && other < sequence);
    }
    for (int apart = 16; apart > 0; apart /= 2) {
      before += __shfl_xor_sync(0xffffffffu, before, apart);
    }
    if (lane == 0) {
      order[before] = sequence;
    }
  }
}

// Writes LSE and D of a row block's rows.
template <class Element>
__device__ void write_rows(BwdParams const& p, QueryTile const& shape, WorkTile const& tile,
                           BlockInfo const& info, int64_t row_block, bool is_sequence) {
  int const row_begin = tile.m_block * shape.block_m;
  int const rows = info.seqlen_q - row_begin;  // rows that exist from row_begin on
  RowLanes const lanes(p.head_dim_v);
  for (int first = lanes.first; first < shape.block_m; first += kRowsTogether * lanes.step) {
    int64_t const row = info.row_q + row_begin + first;
    Element const* const dout =
        static_cast<Element const*>(p.dout.ptr) + p.dout.offset(tile.batch, row, tile.head);
    Element const* const out =
        static_cast<Element const*>(p.out.ptr) + p.out.offset(tile.batch, row, tile.head);
    int const exist = is_sequence ? rows - first : 0;
    int const columns_at_once = lanes.per_row * kChunk;
    PartialDots<Element> dots;
#pragma unroll 1
    for (int column = lanes.lane * kChunk; column < p.head_dim_v; column += columns_at_once) {
      dots.add(dout + column, p.dout.row_stride, out + column, p.out.row_stride, exist, lanes.step);
    }
    // Each of the first lanes has one of the rows, so that their LSEs come together.
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < kRowsTogether; ++i) {
      float const sum = lanes.sum(dots.sum[i]);
      dot = lanes.lane == i ? sum : dot;
    }
    int const r = first + lanes.lane * lanes.step;
    if (lanes.lane < kRowsTogether && r < shape.block_m) {
      RowPlace const at{tile, info.row_q + row_begin + r, row_block, r};
      float const lse = lse_of(p, at, r < rows && is_sequence);
      write_row(p, shape, at, r < rows, is_sequence, lse, dot);
    }
  }
}

// Each CTA has one row block of one head.
template <class Element>
__global__ void __launch_bounds__(kPassThreads)
    preprocess_kernel(__grid_constant__ BwdParams const p, __grid_constant__ QueryTile const shape,
                      __grid_constant__ TileGrid const grid) {
  let_next_launch_start();
  RowBlocks const row_blocks{shape.block_m};
  // Each CTA clears one semaphore, even if it has no rows: a CTA that waits must find a number
  // there, whatever the lengths are.
  if (p.workspace.dq_semaphores && threadIdx.x == 0 &&
      blockIdx.x < p.heads_q * row_blocks.count(p.seqlens)) {
    p.workspace.dq_semaphores[blockIdx.x] = 0;
  }
  if (p.workspace.order) {
    order_sequences(p.seqlens, p.workspace.order);
  }
  // The last tiles come first: what is written last is for the tiles that the main kernel begins
  // with, and still in L2 then.
  WorkTile const tile = grid.tile(p.seqlens, gridDim.x - 1 - blockIdx.x);
  if (!tile.valid) {
    return;
  }
  BlockInfo const info(p.seqlens, tile.batch);
  int64_t const row_block = tile.head * row_blocks.count(p.seqlens) +
                            row_blocks.first(p.seqlens, tile.batch, info.row_q) + tile.m_block;
  // Other rows have contents that no code may count on, and no index in the workspace.
  bool const is_sequence = tile.batch < p.seqlens.batch;
  write_rows<Element>(p, shape, tile, info, row_block, is_sequence);
  // Zeros come last: loads would wait behind the stores.
  if (p.dq.ptr) {
    zero_query_gradient<Element>(p, shape, tile, info, row_block, is_sequence);
  }
}

// The preprocess of a kernel whose delta warps compute D: clears the dQ semaphores, and computes D
// of the first `first` heads, of all batch entries, one row block by each CTA.
template <class Element>
__global__ void __launch_bounds__(kPassThreads)
    begin_ordered_dq_kernel(__grid_constant__ BwdParams const p,
                            __grid_constant__ QueryTile const shape, int first) {
  let_next_launch_start();
  RowBlockOrder const order(p, shape.block_m);
  BwdWorkspace const& w = p.workspace;
  int const thread = static_cast<int>(blockIdx.x * kPassThreads + threadIdx.x);
  int const threads = static_cast<int>(gridDim.x * kPassThreads);
  for (int i = thread; i < order.count(); i += threads) {
    w.dq_semaphores[i] = 0;
  }
  for (int i = thread; i < order.all_heads(); i += threads) {
    w.deltas_done[i] = i < first ? order.row_blocks : 0;
  }
  if (thread == 0) {
    w.deltas_done[order.all_heads()] = first * order.row_blocks;
  }
  WorkTile const tile = order.at(static_cast<int>(blockIdx.x));
  if (tile.valid) {
    write_rows<Element>(p, shape, tile, BlockInfo(p.seqlens, tile.batch), order.index(tile), true);
  }
}

}  // namespace flash
