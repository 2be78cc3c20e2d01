// The tensor maps by which keys and values are loaded, in pages or not.
#pragma once

#include <numeric>

#include "launch/error.h"
#include "params/fwd_params.h"
#include "sm90/tensor_map.h"

namespace flash::sm90 {

// Keys of a box of a tile: all of them, unless they are in pages. Then a tile takes several boxes,
// none of which covers two pages.
inline int box_keys(FwdParams const& p, int tile) {
  int const divides_both = std::gcd(tile, static_cast<int>(p.pages.page_size.divisor));
  return p.pages.table ? divides_both & -divides_both : tile;
}

// The map of K or V.
inline TensorMapRequest key_request(FwdParams const& p, TensorView<const void> const& view,
                                    int columns, int box_rows, int box_columns) {
  Seqlens const& s = p.seqlens;
  bool const paged = p.pages.table;
  int const batch = paged ? p.pages.count : s.cu_k ? 1 : s.batch_k ? s.batches_k : s.batch;
  bool const ends = paged || s.cu_k || s.used_k;  // sequences end before the tensor does
  int64_t const rows = paged ? int64_t(p.pages.page_size.divisor) : s.cu_k ? s.total_k : s.seqlen_k;
  bool const has_elements = batch > 0 && rows > 0 && p.heads_kv > 0;
  check(!ends || !has_elements || view.numbers_rows(batch, rows),
        "batch entries of keys that end anywhere are ", view.batch_stride,
        " elements apart, expected a multiple of a row's ", view.row_stride,
        ", and fewer than 2^31 rows from the first to the last");
  // K and V without elements may have no address.
  return {view.ptr ? view : p.q,
          columns,
          rows,
          p.heads_kv,
          batch,
          box_rows,
          box_columns,
          ends ? Boxes::EndWithRow : Boxes::EndWithTensor,
          1};
}

}  // namespace flash::sm90
