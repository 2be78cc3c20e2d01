// After a main kernel whose groups were cut: dK and dV, each row the sum of its parts, in their
// order, so that they are the same bits in every run.
#pragma once

#include "backward/preprocess.h"

namespace flash {

// Chunks of a row, of dK and then of dV, where they have parts.
struct RowChunks {
  int dk;
  int dv;

  FLASH_HD explicit RowChunks(BwdParams const& p)
      : dk(p.workspace.dk.ptr ? p.head_dim / kChunk : 0),
        dv(p.workspace.dv.ptr ? p.head_dim_v / kChunk : 0) {}
  FLASH_HD int count() const { return dk + dv; }
};

// Of all rows and KV heads. Where there are any, an int counts them: only a group with few tiles is
// cut.
FLASH_HD int64_t part_chunks(BwdParams const& p) {
  return num_keys(p.seqlens) * p.heads_kv * RowChunks(p).count();
}

struct KeyPlace {
  int batch;
  int row;
  int head;  // KV head
};

template <class Element>
__device__ void add_parts(TensorView<float> const& sums, TensorView<void> const& to, int parts,
                          KeyPlace const& at, int column) {
  float const* const first = sums.ptr + sums.offset(at.batch, at.row, at.head * parts) + column;
  float sum[kChunk] = {};
#pragma unroll 2
  for (int part = 0; part < parts; ++part) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      auto const x = *reinterpret_cast<float4 const*>(first + part * sums.head_stride + i);
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

template <class Element>
__global__ void __launch_bounds__(kPassThreads)
    key_gradients_kernel(__grid_constant__ BwdParams const p) {
  RowChunks const chunks(p);
  int const index = static_cast<int>(blockIdx.x) * kPassThreads + static_cast<int>(threadIdx.x);
  int const line = index / chunks.count(), chunk = index - line * chunks.count();
  int const row = line / p.heads_kv;
  if (row >= num_keys(p.seqlens)) {
    return;
  }
  int const batch = p.seqlens.cu_k ? 0 : row / p.seqlens.seqlen_k;
  KeyPlace const at{batch, row - batch * p.seqlens.seqlen_k, line - row * p.heads_kv};
  int const parts = p.group.parts;
  if (chunk < chunks.dk) {
    add_parts<Element>(p.workspace.dk, p.dk, parts, at, chunk * kChunk);
  } else {
    add_parts<Element>(p.workspace.dv, p.dv, parts, at, (chunk - chunks.dk) * kChunk);
  }
}

}  // namespace flash
