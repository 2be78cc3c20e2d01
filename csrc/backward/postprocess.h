// After the main kernel: dQ from fp32 sums to rows of dq, and the sinks' gradient.
#pragma once

#include <algorithm>
#include <cmath>

#include "backward/preprocess.h"
#include "core/dynamic_smem.h"
#include "core/softmax.h"

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

// Sums in accumulator order → shared memory (block_m, padded_row). A thread of the main kernel
// holds quads of numbers, two neighbours in each of two rows; one or two threads here take the
// quads of each. Of the row tiles, those of `part`.
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
    int const row_tile = quad & (row_tiles - 1), group = quad >> row_tile_bits;
    int const column = group / 2 * shape.group_columns + group % 2 * 8;
    float4 const x = sums_of_quad(sums + group * shape.group_stride + row_tile * shape.tile_stride,
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

// Thread blocks for a row block: of 128 rows so few fit a multiprocessor that they wait for memory.
FLASH_HD int query_gradient_parts(QueryTile const& shape) {
  return shape.block_m > 64 && shape.block_m / (16 * shape.row_warps) % 2 == 0 ? 2 : 1;
}

// Of a multiprocessor, by registers: it waits for memory, and the tile's look-up would have more.
constexpr int kPassBlocks = 6;

// A row block of one head, or part of it.
template <class Element>
__global__ void __launch_bounds__(kPassThreads, kPassBlocks)
    query_gradient_kernel(__grid_constant__ BwdParams const p,
                          __grid_constant__ QueryTile const shape,
                          __grid_constant__ TileGrid const grid) {
  int const parts = query_gradient_parts(shape), part = static_cast<int>(blockIdx.x) % parts;
  WorkTile const tile = grid.tile(p.seqlens, static_cast<int>(blockIdx.x) / parts);
  if (!tile.valid || tile.batch >= p.seqlens.batch) {  // other rows are zero already
    return;
  }
  BlockInfo const info(p.seqlens, tile.batch);
  RowBlocks const row_blocks{shape.block_m};
  int64_t const row_block = tile.head * row_blocks.count(p.seqlens) +
                            row_blocks.first(p.seqlens, tile.batch, info.row_q) + tile.m_block;
  auto* const rows = reinterpret_cast<Element*>(dynamic_smem());
  sums_to_rows(p.workspace.dq + row_block * (shape.block_m * shape.head_dim), shape, parts, part,
               p.scores.softmax_scale / (1.f - p.scores.dropout_p), rows);
  __syncthreads();
  int const part_rows = shape.block_m / parts;
  int const row_begin = tile.m_block * shape.block_m + part * part_rows;
  int const chunks = p.head_dim / kChunk, count = std::min(info.seqlen_q - row_begin, part_rows);
  Element* const dq =
      static_cast<Element*>(p.dq.ptr) + p.dq.offset(tile.batch, info.row_q + row_begin, tile.head);
#pragma unroll 2
  for (int i = threadIdx.x; i < count * chunks; i += kPassThreads) {
    int const row = i / chunks, column = i % chunks * kChunk;
    *reinterpret_cast<Chunk<Element>*>(dq + row * p.dq.row_stride + column) =
        *reinterpret_cast<Chunk<Element> const*>(rows + row * padded_row(shape.head_dim) + column);
  }
}

// ds_aux[h] = -sum over rows of exp(s_aux - lse) * softmax_d: one thread block per head, in one
// order. Rows of LSE -inf saw not even a sink.
__global__ void __launch_bounds__(kPassThreads)
    sink_gradient_kernel(__grid_constant__ BwdParams const p) {
  auto* const sums = reinterpret_cast<float*>(dynamic_smem());
  int const head = blockIdx.x;
  bool const packed = p.seqlens.cu_q != nullptr;
  int64_t const rows = packed ? p.seqlens.total_q : p.seqlens.seqlen_q;
  int const batches = packed ? 1 : p.seqlens.batch;
  float const sink = p.scores.s_aux[head];
  float sum = 0.f;
  for (int batch = 0; batch < batches; ++batch) {
    for (int64_t row = threadIdx.x; row < rows; row += kPassThreads) {
      float const lse = *p.lse.at(batch, row, head);
      float const weight = lse == -INFINITY ? 0.f : exp2_fast((sink - lse) * kLog2e);
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
