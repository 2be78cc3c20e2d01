// Passes after the main kernel: dQ from fp32 sums to rows of dq, and the sinks' gradient.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/dynamic_smem.h"
#include "passes/backward/preprocess.h"

namespace flash {

// A row in shared memory: 16 bytes longer, so that eight rows are on different banks.
FLASH_HD int padded_row(int head_dim) { return head_dim + kChunk; }

template <class Element>
struct alignas(2 * sizeof(Element)) Neighbours {
  Element element[2];
};

// The four numbers of a quad, `stride` apart.
__device__ inline float4 sums_of_quad(float const* sum, int stride) {
  return stride == 1 ? *reinterpret_cast<float4 const*>(sum)
                     : float4{sum[0], sum[stride], sum[2 * stride], sum[3 * stride]};
}

// Copies sums in accumulator order to shared memory (block_m, padded_row), for the row tiles of
// `part`. A thread of the main kernel holds quads of numbers, two neighbours in each of two rows;
// one or two threads here take the quads of each.
template <class Element>
__device__ void sums_to_rows(float const* sums, QueryTile const& shape, int parts, int part,
                             float scale, Element* rows) {
  int const thread = threadIdx.x % shape.threads, warp = thread / 32, lane = thread % 32;
  int const row_warp = warp % shape.row_warps, column_warp = warp / shape.row_warps;
  int const row_tiles = shape.block_m / (16 * shape.row_warps) / parts;  // a power of two
  int const row_tile_bits = __ffs(row_tiles) - 1;
  int const quads = shape.block_m * shape.head_dim / 4 / shape.threads / parts;
  int const row_stride = padded_row(shape.head_dim);
  sums += thread * shape.thread_stride + part * row_tiles * shape.tile_stride;
  rows += (row_warp * 16 + lane / 4) * row_stride + column_warp * shape.warp_columns + lane % 4 * 2;
#pragma unroll 4
  for (int quad = threadIdx.x / shape.threads; quad < quads; quad += kPassThreads / shape.threads) {
    int const row_tile = quad & (row_tiles - 1), eight = quad >> row_tile_bits;
    int const column = eight / 2 * shape.pair_columns + eight % 2 * 8;
    float4 const x = sums_of_quad(sums + eight * shape.eight_stride + row_tile * shape.tile_stride,
                                  shape.element_stride);
    Element* const row = rows + row_tile * shape.row_warps * 16 * row_stride + column;
    auto const store = [&](Element* to, float first, float second) {
      *reinterpret_cast<Neighbours<Element>*>(to) = {Element(first * scale),
                                                     Element(second * scale)};
    };
    store(row, x.x, x.y);
    store(row + 8 * row_stride, x.z, x.w);
  }
}

// CTAs for a row block: with 128 rows each, so few fit an SM that they wait for memory.
FLASH_HD int query_gradient_parts(QueryTile const& shape) {
  return shape.block_m > 64 && shape.block_m / (16 * shape.row_warps) % 2 == 0 ? 2 : 1;
}

// CTAs an SM, as a limit of registers: the pass waits for memory, and the tile's look-up would take
// more.
constexpr int kPassBlocks = 6;

// Rows of dq that a CTA computes from sums.
struct QueryRows {
  WorkTile tile;
  int64_t first;      // in the tensor
  int count;          // that exist, from there on
  int64_t row_block;  // in the workspace; only a sequence's rows have sums there

  __device__ QueryRows(BwdParams const& p, int block_m, TileGrid const& grid, int block) {
    tile = grid.tile(p.seqlens, block);
    if (!tile.valid || tile.batch >= p.seqlens.batch) {  // other rows are zero already
      tile.valid = false;
      return;
    }
    BlockInfo const info(p.seqlens, tile.batch);
    RowBlocks const row_blocks{block_m};
    row_block = tile.head * row_blocks.count(p.seqlens) +
                row_blocks.first(p.seqlens, tile.batch, info.row_q) + tile.m_block;
    first = info.row_q + tile.m_block * block_m;
    count = info.seqlen_q - tile.m_block * block_m;
  }
};

__device__ inline float gradient_scale(BwdParams const& p) {
  return p.scores.softmax_scale / (1.f - p.scores.dropout_p);
}

// Finishes a row block of one head, or a part of it, whose sums are in any order.
template <class Element>
__global__ void __launch_bounds__(kPassThreads, kPassBlocks)
    query_gradient_kernel(__grid_constant__ BwdParams const p,
                          __grid_constant__ QueryTile const shape,
                          __grid_constant__ TileGrid const grid) {
  int const parts = query_gradient_parts(shape), part = static_cast<int>(blockIdx.x) % parts;
  QueryRows const at(p, shape.block_m, grid, static_cast<int>(blockIdx.x) / parts);
  if (!at.tile.valid) {
    return;
  }
  int const part_rows = shape.block_m / parts;
  Element* const dq = static_cast<Element*>(p.dq.ptr) +
                      p.dq.offset(at.tile.batch, at.first + part * part_rows, at.tile.head);
  auto* const rows = reinterpret_cast<Element*>(dynamic_smem());
  sums_to_rows(p.workspace.dq + at.row_block * (shape.block_m * shape.head_dim), shape, parts, part,
               gradient_scale(p), rows);
  __syncthreads();
  int const chunks = p.head_dim / kChunk, count = std::min(at.count - part * part_rows, part_rows);
#pragma unroll 2
  for (int i = threadIdx.x; i < count * chunks; i += kPassThreads) {
    int const row = i / chunks, column = i % chunks * kChunk;
    *reinterpret_cast<Chunk<Element>*>(dq + row * p.dq.row_stride + column) =
        *reinterpret_cast<Chunk<Element> const*>(rows + row * padded_row(shape.head_dim) + column);
  }
}

// Transposes words in a quad: lane l has the l-th word of four chunks before, and all words of the
// l-th chunk afterwards.
__device__ inline void swap_in_quad(uint32_t (&word)[4]) {
#pragma unroll
  for (int apart = 1; apart <= 2; apart *= 2) {
    bool const upper = threadIdx.x & apart;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & apart) == 0) {
        uint32_t& kept = word[i];
        uint32_t& other = word[i + apart];
        uint32_t const got = __shfl_xor_sync(0xffffffffu, upper ? kept : other, apart);
        (upper ? kept : other) = got;
      }
    }
  }
}

// A warp's piece of the sums where a thread's four numbers lie together: 16 rows by 32 columns.
struct SumPiece {
  static constexpr int kRows = 16, kEights = 4;
  float4 of_eight[kEights];  // two neighbours of row lane / 4, two of the row 8 further

  __device__ void load(float const* sums, int eight_stride) {
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      of_eight[i] = *reinterpret_cast<float4 const*>(sums + i * eight_stride);
    }
  }

  // half: which of the two rows. A quad stores 64 bytes of it.
  template <class Element>
  __device__ uint4 chunk(int half, float scale) const {
    uint32_t word[kEights];
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      float4 const x = of_eight[i];
      Neighbours<Element> const pair{Element((half ? x.z : x.x) * scale),
                                     Element((half ? x.w : x.y) * scale)};
      word[i] = reinterpret_cast<uint32_t const&>(pair);
    }
    swap_in_quad(word);
    return {word[0], word[1], word[2], word[3]};
  }
};

// Pieces of a row block's sums, and its rows in dq.
template <class Element>
struct QuadRows {
  QueryTile const& shape;
  float const* sums;
  Element* dq;
  int64_t row_stride;
  int rows;  // that exist
  int columns;
  float scale;

  __device__ QuadRows(BwdParams const& p, QueryTile const& shape_, QueryRows const& at)
      : shape(shape_),
        sums(p.workspace.dq + at.row_block * (shape.block_m * shape.head_dim)),
        dq(static_cast<Element*>(p.dq.ptr) + p.dq.offset(at.tile.batch, at.first, at.tile.head)),
        row_stride(p.dq.row_stride),
        rows(at.count),
        columns(p.head_dim),
        scale(gradient_scale(p)) {}

  __device__ int strips() const { return shape.block_m / SumPiece::kRows; }
  __device__ int pieces() const {
    return strips() * (shape.head_dim / (SumPiece::kEights * kChunk));
  }

  __device__ void load(int number, SumPiece& piece) const {
    int const strip = number % strips(), eight = number / strips() * SumPiece::kEights;
    int const thread = strip % shape.row_warps * 32 + threadIdx.x % 32;
    piece.load(sums + strip / shape.row_warps * shape.tile_stride + thread * shape.thread_stride +
                   eight * shape.eight_stride,
               shape.eight_stride);
  }

  // Stores as far as there are rows and columns; all lanes call it. wanted: whether the piece is
  // there.
  __device__ void store(int number, bool wanted, SumPiece const& piece) const {
    int const strip = number % strips(), eight = number / strips() * SumPiece::kEights;
    int const lane = threadIdx.x % 32, column = (eight + lane % 4) * kChunk;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = strip * SumPiece::kRows + 8 * half + lane / 4;
      uint4 const chunk = piece.template chunk<Element>(half, scale);
      if (wanted && row < rows && column < columns) {
        *reinterpret_cast<uint4*>(dq + row * row_stride + column) = chunk;
      }
    }
  }
};

// Finishes a row block of one head, where a thread's four sums lie together.
template <class Element>
__global__ void __launch_bounds__(kPassThreads)
    query_gradient_quads_kernel(__grid_constant__ BwdParams const p,
                                __grid_constant__ QueryTile const shape,
                                __grid_constant__ TileGrid const grid) {
  constexpr int kWarps = kPassThreads / 32, kTogether = 2;
  // The last tiles first: L2 still holds their sums.
  QueryRows const at(p, shape.block_m, grid, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  wait_for_launch_before();
  if (!at.tile.valid) {
    return;
  }
  QuadRows<Element> const rows(p, shape, at);
  for (int first = threadIdx.x / 32; first < rows.pieces(); first += kTogether * kWarps) {
    SumPiece piece[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const number = first + i * kWarps;
      if (number < rows.pieces()) {
        rows.load(number, piece[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const number = first + i * kWarps;
      rows.store(number, number < rows.pieces(), piece[i]);
    }
  }
}

// A sink's share of a row's denominator, as far as a gradient needs it: a sink of +inf has all of
// it wherever it moves to, and counts as 0. LSE -inf: the row saw not even a sink.
__device__ inline float sink_share(float sink, float lse) {
  bool const none = lse == -INFINITY || sink == INFINITY;
  return none ? 0.f : exp2_fast((sink - lse) * kLog2e);
}

// ds_aux[h] = -sum over rows of sink_share * softmax_d: one CTA per head, in one order.
__global__ void __launch_bounds__(kPassThreads)
    sink_gradient_kernel(__grid_constant__ BwdParams const p) {
  auto* const sums = reinterpret_cast<float*>(dynamic_smem());
  int const head = blockIdx.x;
  bool const varlen = p.seqlens.cu_q != nullptr;
  int64_t const rows = varlen ? p.seqlens.total_q : p.seqlens.seqlen_q;
  int const batches = varlen ? 1 : p.seqlens.batch;
  float const sink = p.scores.s_aux[head];
  float sum = 0.f;
  for (int batch = 0; batch < batches; ++batch) {
    for (int64_t row = threadIdx.x; row < rows; row += kPassThreads) {
      float const lse = *p.lse.at(batch, row, head);
      float const weight = sink_share(sink, lse);
      sum += weight == 0.f ? 0.f : weight * *p.softmax_d.at(batch, row, head);
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = kPassThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      sums[threadIdx.x] += sums[threadIdx.x + half];
    }
  }
  if (threadIdx.x == 0) {
    p.ds_aux[head] = -sums[0];
  }
}

}  // namespace flash
