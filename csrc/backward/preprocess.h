// Before the main kernel: D = rowsum(dO * O) - dLSE, what the main kernel reads of a row, and zeros
// where it adds.
#pragma once

#include <algorithm>
#include <cmath>

#include "backward/passes.h"
#include "core/block_info.h"
#include "core/row_blocks.h"
#include "core/softmax.h"
#include "core/tile_grid.h"

namespace flash {

constexpr int kPassThreads = 256;
constexpr int kLanesPerRow = 8;  // 128 bytes of a row at a time
constexpr int kChunk = 8;        // elements in 16 bytes

template <class Element>
struct alignas(16) Chunk {
  Element element[kChunk];
};

// This lane's part of the product of two rows; columns are a multiple of kChunk.
template <class Element>
__device__ float partial_dot(Element const* a, Element const* b, int columns, int lane) {
  float sum = 0.f;
#pragma unroll 4
  for (int c = lane * kChunk; c < columns; c += kLanesPerRow * kChunk) {
    auto const x = *reinterpret_cast<Chunk<Element> const*>(a + c);
    auto const y = *reinterpret_cast<Chunk<Element> const*>(b + c);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      sum += float(x.element[i]) * float(y.element[i]);
    }
  }
  return sum;
}

// Where the main kernel adds, or the rows of dq where it stores those that see a key, or never
// comes.
template <class Element>
__device__ void zero_query_gradient(BwdParams const& p, QueryTile const& shape,
                                    WorkTile const& tile, BlockInfo const& info, int64_t row_block,
                                    bool is_sequence) {
  if (!p.workspace.dq || !is_sequence) {
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

// One row block of one head.
template <class Element>
__global__ void __launch_bounds__(kPassThreads)
    preprocess_kernel(__grid_constant__ BwdParams const p, __grid_constant__ QueryTile const shape,
                      __grid_constant__ TileGrid const grid) {
  RowBlocks const row_blocks{shape.block_m};
  // One each, also by blocks without rows: who waits for a turn must find a number there, whatever
  // the lengths are.
  if (p.workspace.turns && threadIdx.x == 0 &&
      blockIdx.x < p.heads_q * row_blocks.count(p.seqlens)) {
    p.workspace.turns[blockIdx.x] = 0;
  }
  WorkTile const tile = grid.tile(p.seqlens, blockIdx.x);
  if (!tile.valid) {
    return;
  }
  BlockInfo const info(p.seqlens, tile.batch);
  int64_t const row_block = tile.head * row_blocks.count(p.seqlens) +
                            row_blocks.first(p.seqlens, tile.batch, info.row_q) + tile.m_block;
  int const row_begin = tile.m_block * shape.block_m;
  int const rows = info.seqlen_q - row_begin;  // at least; the rest of the block does not exist
  // Of the others nobody may count on the contents, and they have no place in the workspace.
  bool const is_sequence = tile.batch < p.seqlens.batch;
  // First, because nobody waits for a store.
  if (p.dq.ptr) {
    zero_query_gradient<Element>(p, shape, tile, info, row_block, is_sequence);
  }
  int const lane = threadIdx.x % kLanesPerRow;
  float* const stats = p.workspace.stats + row_block * (2 * shape.block_m);
#pragma unroll 2
  for (int r = threadIdx.x / kLanesPerRow; r < shape.block_m; r += kPassThreads / kLanesPerRow) {
    int64_t const row = info.row_q + row_begin + r;
    float d = 0.f;
    if (r < rows && is_sequence) {
      d = partial_dot(
          static_cast<Element const*>(p.dout.ptr) + p.dout.offset(tile.batch, row, tile.head),
          static_cast<Element const*>(p.out.ptr) + p.out.offset(tile.batch, row, tile.head),
          p.head_dim_v, lane);
    }
#pragma unroll
    for (int other = kLanesPerRow / 2; other > 0; other /= 2) {
      d += __shfl_xor_sync(0xffffffffu, d, other);
    }
    if (lane != 0) {
      continue;
    }
    float lse = -INFINITY;
    if (r < rows) {
      if (is_sequence) {
        lse = *p.lse.at(tile.batch, row, tile.head);
        d -= p.dlse.ptr ? *p.dlse.at(tile.batch, row, tile.head) : 0.f;
      }
      *p.softmax_d.at(tile.batch, row, tile.head) = d;
    }
    if (!is_sequence) {
      continue;
    }
    // exp2(x - inf) = 0: rows without keys, and those that do not exist, need no predicate. Under
    // dropout the kept part of dP is not divided by 1 - p; D is multiplied by it instead.
    bool const empty = lse == -INFINITY;
    stats[r] = empty ? INFINITY : lse * kLog2e;
    stats[shape.block_m + r] = empty ? 0.f : d * (1.f - p.scores.dropout_p);
  }
}

}  // namespace flash
