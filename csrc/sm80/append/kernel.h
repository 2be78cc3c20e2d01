// Before attention against a cache: new keys turn by their positions and go into it, new values go
// into it, and queries turn on their way to a workspace. One warp a row, 16 bytes a lane.
#pragma once

#include "core/paging.h"
#include "params/append_params.h"
#include "sm80/append/turn.h"

namespace flash::sm80 {

struct AppendRow {
  int sequence;
  int row;  // new key, or query
  int head;
};

// Rows are numbered (sequence, row, head), heads first.
__device__ inline AppendRow append_row(int index, FastDiv const& rows, FastDiv const& heads) {
  int const sequence_and_row = heads.quotient(index);
  int const sequence = rows.quotient(sequence_and_row);
  return {sequence, rows.remainder(sequence_and_row, sequence),
          heads.remainder(index, sequence_and_row)};
}

// One row: this lane's chunk of it, turned if there are angles.
template <class Element>
__device__ void copy_row(Rotary const& rotary, uint32_t position, Element const* source,
                         Element* target, int columns, int col) {
  if (col >= columns) {
    return;
  }
  auto const chunk = *reinterpret_cast<uint128_t const*>(source + col);
  if (!rotary.cos || col >= rotary.rotary_dim) {
    *reinterpret_cast<uint128_t*>(target + col) = chunk;
    return;
  }
  float x[8];
  read(source + col, x);
  turn(rotary, Angles<Element>(rotary, position), source, col, x);
  cutlass::NumericArrayConverter<Element, float, 8> convert;
  auto const rounded = convert(*reinterpret_cast<cutlass::Array<float, 8> const*>(x));
  *reinterpret_cast<uint128_t*>(target + col) = *reinterpret_cast<uint128_t const*>(&rounded);
}

// A new key's, or value's, row into the cache, if it has a place there.
template <class Element>
__device__ void append(AppendParams const& p, TensorView<const void> const& from,
                       TensorView<void> const& cache, Rotary const& rotary, int index, int columns,
                       int col) {
  AppendRow const at = append_row(index, p.new_k, p.heads_kv);
  int const before = p.seqlens.used_k[at.sequence];
  if (before < 0 || before >= p.seqlens.seqlen_k - at.row) {
    return;
  }
  KeyPages const pages(p.pages, BlockInfo(p.seqlens, at.sequence), at.sequence);
  PageSlot const slot = pages.slot(before + at.row);
  if (pages.exists(slot)) {
    copy_row(rotary, before + at.row,
             static_cast<Element const*>(from.ptr) + from.offset(at.sequence, at.row, at.head),
             static_cast<Element*>(cache.ptr) + cache.offset(slot.page, slot.row, at.head), columns,
             col);
  }
}

template <class Element>
__device__ void turn_query(AppendParams const& p, int index, int col) {
  AppendRow const at = append_row(index, p.seqlen_q, p.heads_q);
  uint32_t const before = max(p.seqlens.used_k[at.sequence], 0);  // anything
  copy_row(p.rotary, before + (p.rotary.advance_q ? at.row : 0),
           static_cast<Element const*>(p.q.ptr) + p.q.offset(at.sequence, at.row, at.head),
           static_cast<Element*>(p.q_turned.ptr) + p.q_turned.offset(at.sequence, at.row, at.head),
           p.head_dim, col);
}

// Rows of the three kinds: queries, keys, values.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    append_kernel(__grid_constant__ AppendParams const p) {
  using Element = typename Config::Element;
  int64_t const row = int64_t(blockIdx.x) * Config::kRows + threadIdx.x / 32;
  int const col = threadIdx.x % 32 * Config::kChunk;
  if (row < p.queries) {
    turn_query<Element>(p, static_cast<int>(row), col);
  } else if (int64_t const key = row - p.queries; key < p.keys) {
    append<Element>(p, p.k, p.k_cache, p.rotary, static_cast<int>(key), p.head_dim, col);
  } else if (int64_t const value = key - p.keys; value < p.keys) {
    append<Element>(p, p.v, p.v_cache, Rotary{}, static_cast<int>(value), p.head_dim_v, col);
  }
}

}  // namespace flash::sm80
