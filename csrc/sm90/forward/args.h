#pragma once

#include <type_traits>

#include "core/page_boxes.h"
#include "core/tile_grid.h"
#include "core/tile_queue.h"
#include "params/fwd_params.h"
#include "sm90/tensor_map.h"

namespace flash::sm90::forward {

// The rows of a warpgroup: `queries` queries with `heads` heads each (core/work_tile.h). Rows that
// are left over hold nothing.
struct RowPacking {
  FastDiv heads;
  int queries;

  // `queries`, known to the compiler where a row is a query.
  template <class Config>
  __device__ int queries_of() const {
    return Config::kPackGqa ? queries : Config::kBlockM / Config::kConsumers;
  }
};

// What a launch passes to the kernel.
struct ForwardArgs {
  TensorMap q;  // boxes of a warpgroup's rows
  TensorMap k;  // boxes of box_keys keys; in a kernel for pages only, of eight
  TensorMap v;
  TensorMap out;  // boxes of a warp's rows; only where O is stored by tiles
  int box_keys;   // kBlockN; with pages, a power of two that divides it and a page
  RowPacking rows;
  FwdParams params;
  TileGrid grid;
  TileQueue queue;
};

// Arguments of a kernel for pages only, whose boxes have all columns: box_keys keys of small pages,
// each of PageBox's sizes of large ones.
template <int kSizes>
struct PagesArgs : ForwardArgs {
  TensorMap k_boxes[kSizes];
  TensorMap v_boxes[kSizes];
};

template <class Config>
constexpr int kBoxSizes = Config::kLargePages ? PageBox::kSizes : 1;

template <class Config>
using ArgsOf = std::conditional_t<Config::kPagesOnly, PagesArgs<kBoxSizes<Config>>, ForwardArgs>;

}  // namespace flash::sm90::forward
