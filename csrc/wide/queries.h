// Loads a tile's rows of Q.
#pragma once

#include "core/copy_async.h"
#include "decode/tile_rows.h"

namespace flash::wide {

// Starts to copy `rows` rows to shared memory, by all threads; latent: qv before q. Columns beyond
// the heads', and rows that do not exist, become zero. at(row, column): where a chunk of 8 columns
// goes
template <class Config, class At>
__device__ void load_queries(FwdParams const& p, decode::DecodeTile<Config> const& tile,
                             FastDiv const& group, int rows, At at) {
  using Element = typename Config::Element;
  constexpr int kChunks = Config::kScoreColumns / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * kChunks; i += Config::kThreads) {
    int const r = i / kChunks, column = i % kChunks * 8;
    bool const of_value = Config::kLatent && column < Config::kFirstColumns, exists = r < tile.rows;
    int const col = Config::kLatent && !of_value ? column - Config::kFirstColumns : column;
    QueryRow const row = tile.row(group, exists ? r : 0);
    TensorView<const void> const& view = of_value ? p.q_latent : p.q;
    Element const* const source =
        static_cast<Element const*>(view.ptr) +
        view.offset(tile.sequence, tile.info.row_q + row.query, row.head) + col;
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
        *reinterpret_cast<cute::uint128_t const*>(source),
        *reinterpret_cast<cute::uint128_t*>(at(r, column)),
        exists && col < (of_value ? p.head_dim_v : p.head_dim));
  }
}

}  // namespace flash::wide
