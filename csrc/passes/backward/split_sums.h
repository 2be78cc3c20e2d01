// The launch after a main kernel with GQA splits or row splits: each row of dK and dV is the sum
// of its splits' sums, in their order, so that every run gives the same bits.
#pragma once

#include "passes/backward/preprocess.h"

namespace flash {

// Chunks of a row, of dK and then of dV, where splits have sums of them.
struct RowChunks {
  int dk;
  int dv;

  FLASH_HD explicit RowChunks(BwdParams const& p)
      : dk(p.workspace.dk.ptr ? p.head_dim / kChunk : 0),
        dv(p.workspace.dv.ptr ? p.head_dim_v / kChunk : 0) {}
  FLASH_HD int count() const { return dk + dv; }
};

// Chunks of all rows and KV heads. An int counts them, because only a group with few tiles is
// split.
FLASH_HD int64_t gqa_split_chunks(BwdParams const& p) {
  return num_keys(p.seqlens) * p.heads_kv * RowChunks(p).count();
}

struct KeyRow {
  int batch;
  int row;
  int head;  // KV head
};

// A row's sums in each split.
struct SplitSums {
  float const* first;
  int64_t stride;  // to the next split's
  int splits;
};

template <class Element>
__device__ void add_splits(SplitSums const& sums, TensorView<void> const& to, KeyRow const& at,
                           int column) {
  float sum[kChunk] = {};
#pragma unroll 2
  for (int split = 0; split < sums.splits; ++split) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      auto const x = *reinterpret_cast<float4 const*>(sums.first + split * sums.stride + i);
      sum[i] += x.x;
      sum[i + 1] += x.y;
      sum[i + 2] += x.z;
      sum[i + 3] += x.w;
    }
  }
  Chunk<Element> chunk;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    chunk.element[i] = Element(sum[i]);
  }
  *reinterpret_cast<Chunk<Element>*>(static_cast<Element*>(to.ptr) +
                                     to.offset(at.batch, at.row, at.head) + column) = chunk;
}

// The chunk of a thread, in the `line`-th row of dK and dV.
struct RowChunk {
  int line;
  int number;  // in the row

  __device__ explicit RowChunk(RowChunks const& chunks) {
    int const index = static_cast<int>(blockIdx.x) * kPassThreads + static_cast<int>(threadIdx.x);
    line = index / chunks.count();
    number = index - line * chunks.count();
  }

  // Calls add(sums, gradient, column) for dK or dV.
  template <class Add>
  __device__ void add_to(BwdParams const& p, RowChunks const& chunks, Add add) const {
    if (number < chunks.dk) {
      add(p.workspace.dk, p.dk, number * kChunk);
    } else {
      add(p.workspace.dv, p.dv, (number - chunks.dk) * kChunk);
    }
  }
};

template <class Element>
__global__ void __launch_bounds__(kPassThreads)
    add_gqa_splits_kernel(__grid_constant__ BwdParams const p) {
  RowChunks const chunks(p);
  RowChunk const chunk(chunks);
  int const row = chunk.line / p.heads_kv;
  if (row >= num_keys(p.seqlens)) {
    return;
  }
  int const batch = p.seqlens.cu_k ? 0 : row / p.seqlens.seqlen_k;
  KeyRow const at{batch, row - batch * p.seqlens.seqlen_k, chunk.line - row * p.heads_kv};
  int const splits = p.gqa.splits;
  chunk.add_to(p, chunks, [&](auto const& sums, TensorView<void> const& to, int column) {
    float const* const first = sums.ptr + sums.offset(at.batch, at.row, at.head * splits) + column;
    add_splits<Element>({first, sums.head_stride, splits}, to, at, column);
  });
}

// The same for tiles that are cut into row splits.
FLASH_HD int64_t row_split_chunks(BwdParams const& p, MainTiles const& tiles) {
  return int64_t(p.row_split.tiles) * tiles.block_n * RowChunks(p).count();
}

template <class Element>
__global__ void __launch_bounds__(kPassThreads)
    add_row_splits_kernel(__grid_constant__ BwdParams const p,
                          __grid_constant__ MainTiles const tiles) {
  RowChunks const chunks(p);
  RowChunk const chunk(chunks);
  int const number = chunk.line / tiles.block_n, key = chunk.line - number * tiles.block_n;
  if (number >= p.row_split.tiles) {
    return;
  }
  WorkTile const tile = tiles.grid.tile(nullptr, 0, 0, p.row_split.whole + number);
  KeyRow const at{tile.batch, tile.m_block * tiles.block_n + key, tile.head};
  if (at.row >= p.seqlens.seqlen_k) {
    return;
  }
  int const splits = p.row_split.splits;
  chunk.add_to(p, chunks, [&](auto const& sums, TensorView<void> const& to, int column) {
    int64_t const slot = tiles.block_n * sums.row_stride;
    float const* const first = sums.ptr + number * splits * slot + key * sums.row_stride + column;
    add_splits<Element>({first, slot, splits}, to, at, column);
  });
}

}  // namespace flash
