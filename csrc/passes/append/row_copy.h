// One row of q, K or V that a call brings, on its way to where attention reads it: the cache, or a
// workspace for rotated queries. 16 bytes a step.
#pragma once

#include "core/coded.h"
#include "core/paging.h"
#include "passes/append/rotate.h"

namespace flash::append {

template <class Element>
struct RowCopy {
  Element const* from = nullptr;
  void* to = nullptr;     // Elements, or codes; null: the row has no place
  uint32_t position = 0;  // in the rotary tables
  bool rotates = false;
  bool odd = false;  // the target does not consist of chunks
  int columns = 0;
  bool codes = false;
  float scale = 1.f;  // of the codes

  __device__ bool has(int col) const { return to && col < columns; }

  // Elements [col, col + 8), rotated.
  __device__ uint128_t chunk(Rotary const& rotary, int col) const {
    if (!rotates || col >= rotary.rotary_dim) {
      return *reinterpret_cast<uint128_t const*>(from + col);
    }
    float x[8];
    read(from + col, x);
    rotate_chunk(rotary, Angles<Element>(rotary, position), from, col, x);
    cutlass::NumericArrayConverter<Element, float, 8> convert;
    auto const rounded = convert(*reinterpret_cast<cutlass::Array<float, 8> const*>(x));
    return *reinterpret_cast<uint128_t const*>(&rounded);
  }

  __device__ void store(int col, uint128_t chunk) const {
    auto const& elements = reinterpret_cast<cutlass::Array<Element, 8> const&>(chunk);
    if (codes) {
      store_chunk(col, coded<8>(elements, scale));
    } else {
      store_chunk(col, elements);
    }
  }

 private:
  template <class Number>
  __device__ void store_chunk(int col, cutlass::Array<Number, 8> const& chunk) const {
    auto* const row = static_cast<Number*>(to);
    if (!odd) {
      using Aligned = cutlass::AlignedArray<Number, 8>;
      static_cast<cutlass::Array<Number, 8>&>(*reinterpret_cast<Aligned*>(row + col)) = chunk;
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < columns) {
        row[col + i] = chunk[i];
      }
    }
  }
};

// Where a row is: query or new key `row` of a sequence.
struct NewRow {
  int sequence;
  int row;
  int head;
};

template <class Element>
__device__ RowCopy<Element> row_copy(TensorView<const void> const& from, NewRow at, void* to,
                                     int columns) {
  RowCopy<Element> copy;
  copy.from = static_cast<Element const*>(from.ptr) + from.offset(at.sequence, at.row, at.head);
  copy.to = to;
  copy.columns = columns;
  return copy;
}

// A query; `before` keys are there before the new ones.
template <class Element>
__device__ RowCopy<Element> query_copy(NewRows const& rows, NewRow at, int before, int columns) {
  TensorView<void> const& rotated = rows.q_rotated;
  auto* const to =
      static_cast<Element*>(rotated.ptr) + rotated.offset(at.sequence, at.row, at.head);
  RowCopy<Element> copy = row_copy<Element>(rows.q, at, to, columns);
  copy.rotates = true;
  // `before` may be any number.
  copy.position = uint32_t(max(before, 0)) + (rows.rotary.advance_q ? at.row : 0);
  return copy;
}

// Where a new key goes after `before` others; no page if it has no place among `capacity`.
__device__ inline PageSlot slot_of(KeyPages const& pages, NewRow at, int before, int capacity) {
  bool const fits = before >= 0 && before < capacity - at.row;
  PageSlot const slot = fits ? pages.slot(before + at.row) : PageSlot{PageSlot::kNoPage, 0};
  return pages.exists(slot) ? slot : PageSlot{PageSlot::kNoPage, 0};
}

// A new key on its way into the cache, or else its value.
template <class Element>
__device__ RowCopy<Element> cache_copy(NewRows const& rows, bool is_key, KeyPages const& pages,
                                       NewRow at, int before, int capacity) {
  TensorView<void> const& cache = is_key ? rows.k_cache : rows.v_cache;
  PageSlot const slot = slot_of(pages, at, before, capacity);
  bool const codes = rows.codes.used, exists = slot.page != PageSlot::kNoPage;
  int64_t const offset = cache.offset(slot.page, slot.row, at.head);
  void* const to =
      exists ? static_cast<char*>(cache.ptr) + offset * (codes ? 1 : sizeof(Element)) : nullptr;
  RowCopy<Element> copy =
      row_copy<Element>(is_key ? rows.k : rows.v, at, to, is_key ? rows.columns_k : rows.columns_v);
  if (codes && exists) {
    Descale const& scale = is_key ? rows.codes.k : rows.codes.v;
    float const* const of_row = scale.of_row(slot.page, slot.row, at.head);
    copy.codes = true;
    copy.scale = scale.of_head(at.sequence, at.head) * (of_row ? *of_row : 1.f);
  }
  copy.odd = rows.odd;
  copy.rotates = is_key && rows.rotary.cos;
  copy.position = uint32_t(before) + at.row;
  return copy;
}

}  // namespace flash::append
