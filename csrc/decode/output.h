// Where a tile's rows go: to O and LSE, or to the workspace.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "core/softmax.h"
#include "decode/tile_rows.h"

namespace flash::decode {

template <class Config>
struct DecodeOutput {
  static constexpr int kWhole = -1;
  static constexpr bool kOpensLate = false;
  using Element = typename Config::Element;
  DecodeParams const& p;
  DecodeWork<Config> const& work;
  int number;  // the piece whose rows of the workspace are stored, or kWhole: O and LSE

  __device__ bool partial() const { return number != kWhole; }

  // The workspace's row r of a piece of the same tile.
  __device__ static int64_t partial_row(Piece const& piece, int number, int r) {
    return (piece.first + int64_t(number) * piece.step) * Config::kBlockM + r;
  }

  // The row's sink logit, or -inf. It joins a row once: when the whole row is stored.
  __device__ float sink(int r) const {
    float const* const sinks = p.fwd.scores.s_aux;
    bool const here = sinks && !partial() && r < work.tile.rows && work.tile.is_sequence(p.fwd);
    return here ? sinks[work.tile.row(p.group, r).head] : -INFINITY;
  }

  __device__ void store_lse(int r, float lse) const {
    DecodeTile<Config> const& tile = work.tile;
    QueryRow const row = tile.row(p.group, r);
    *(partial() ? p.partial_lse + partial_row(work.piece, number, r)
                : p.fwd.lse.at(tile.sequence, tile.info.row_q + row.query, row.head)) = lse;
  }

  // Columns [col, col + kColumns) of row r
  template <int kColumns>
  __device__ void store(int r, int col, float const (&values)[kColumns]) const {
    if (partial()) {
      auto* const target = reinterpret_cast<float4*>(
          p.partial_out + partial_row(work.piece, number, r) * p.fwd.head_dim_v + col);
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        target[i / 4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
      }
      return;
    }
    DecodeTile<Config> const& tile = work.tile;
    QueryRow const row = tile.row(p.group, r);
    cutlass::NumericArrayConverter<Element, float, kColumns> convert;
    using Rounded = cutlass::AlignedArray<Element, kColumns>;  // stored by one instruction
    auto* const target = static_cast<Element*>(p.fwd.out.ptr) +
                         p.fwd.out.offset(tile.sequence, tile.info.row_q + row.query, row.head) +
                         col;
    static_cast<cutlass::Array<Element, kColumns>&>(*reinterpret_cast<Rounded*>(target)) =
        convert(*reinterpret_cast<cutlass::Array<float, kColumns> const*>(values));
  }

  // The same from the sums of a softmax over results of the row, which one thread has; with the
  // first columns, also the row's LSE.
  template <int kColumns>
  __device__ void finish(int r, int col, OnlineSoftmax<1>& softmax, float (&sums)[kColumns]) const {
    auto const closed = softmax.finish(0, sink(r), NoReduce{});
#pragma unroll
    for (float& sum : sums) {
      sum *= closed.out_scale;
    }
    store(r, col, sums);
    if (col == 0) {
      store_lse(r, closed.lse);
    }
  }
};

}  // namespace flash::decode
