// Launches one instantiation; included by the generated files only.
#pragma once

#include "sm90/tensor_core.h"  // before anything that includes CuTe

#include <algorithm>
#include <stdexcept>

#include "launch/key_splits.h"
#include "passes/max_logits/launch.h"
#include "sm90/forward/kernel.h"
#include "sm90/forward/merge_splits.h"
#include "sm90/key_request.h"
#include "sm90/tile_counters.h"

namespace flash::sm90::forward {

// The map of q or out. A sequence may end anywhere if a tensor says where. group: heads of a box.
template <class T>
TensorMapRequest row_request(FwdParams const& p, TensorView<T> const& view, int columns,
                             int box_rows, int box_columns, int group) {
  Seqlens const& s = p.seqlens;
  return {{view.ptr, view.batch_stride, view.row_stride, view.head_stride},
          columns,
          s.cu_q ? s.total_q : s.seqlen_q,
          p.heads_q,
          s.cu_q ? 1 : s.batch,
          box_rows,
          box_columns,
          s.cu_q && group == 1 ? Boxes::EndWithRow : Boxes::EndWithTensor,
          group};
}

// Codes are loaded in pairs, as numbers of 16 bits.
inline TensorView<const void> in_pairs(TensorView<const void> view) {
  for (int64_t* const stride : {&view.batch_stride, &view.row_stride, &view.head_stride}) {
    *stride /= 2;
  }
  return view;
}

// A kernel for pages only has boxes of all columns, and small ones for a sequence's end.
template <class Config, int kColumns>
TensorMapRequest keys_of(FwdParams const& p, TensorView<const void> const& view, int columns) {
  int const box_rows = Config::kPagesOnly ? kLeastBoxRows : box_keys(p, Config::kBlockN);
  return key_request(p, view, columns, box_rows, kRun<kColumns>);
}

// Rows of a warpgroup: queries of one head, or of all heads that share a KV head.
template <class Config>
RowPacking row_packing(FwdParams const& params) {
  int const group = Config::kPackGqa ? params.group() : 1;
  return {FastDiv(group), kWarpgroupRows / group};
}

template <class Config>
TileGrid tile_grid(FwdParams const& params, RowPacking const& rows) {
  Seqlens const& s = params.seqlens;
  int const heads = Config::kSplit     ? params.heads_kv * int(params.splits.count.divisor)
                    : Config::kPackGqa ? params.heads_kv
                                       : params.heads_q;
  int const block_m = Config::kConsumers * rows.queries;
  // No sequence is longer than a row block: one CTA after another takes one of them.
  return s.cu_q && s.seqlen_q <= block_m
             ? make_first_blocks_grid(s, heads, block_m)
             : make_tile_grid(s, heads, block_m, {params.side_by_side, params.longest_first});
}

// Adds the arguments that only kernels for pages have.
template <class Config>
ArgsOf<Config> with_boxes(ForwardArgs const& args, TensorMapRequest k, TensorMapRequest v) {
  if constexpr (!Config::kPagesOnly) {
    return args;
  } else {
    ArgsOf<Config> more{args, {}, {}};
    k.boxes = v.boxes = Boxes::OfEights;
    for (int i = 0; i < kBoxSizes<Config>; ++i) {
      k.box_rows = v.box_rows = Config::kLargePages ? PageBox::kLargest >> i : args.box_keys;
      more.k_boxes[i] = make_tensor_map(k);
      more.v_boxes[i] = make_tensor_map(v);
    }
    return more;
  }
}

template <class Config>
void launch_tiles(FwdParams const& params, LaunchContext const& launch) {
  RowPacking const rows = row_packing<Config>(params);
  TileGrid const grid = tile_grid<Config>(params, rows);
  int64_t const num_tiles = grid.num_tiles();
  if (num_tiles == 0) {
    return;
  }
  check(num_tiles <= max_grid_blocks, num_tiles, " row blocks in one call, at most ",
        max_grid_blocks, " are served");
  int64_t const blocks = std::min<int64_t>(num_tiles, launch.device.sm_count);
  // Beside a decode launch, fewer CTAs may share the tiles.
  bool const draws = num_tiles > blocks || params.seqlens.few_q > 0;
  auto const loaded = [](auto const& view) { return Config::kCodes ? in_pairs(view) : view; };
  constexpr int kOfLoaded = Config::kCodes ? 2 : 1;  // numbers
  auto const k =
      keys_of<Config, Config::kLoadedK>(params, loaded(params.k), params.head_dim / kOfLoaded);
  auto const v =
      keys_of<Config, Config::kLoadedV>(params, loaded(params.v), params.head_dim_v / kOfLoaded);
  constexpr int kOfQuery = Config::kFp8 ? 2 : 1;
  auto const q =
      row_request(params, Config::kFp8 ? in_pairs(params.q) : params.q, params.head_dim / kOfQuery,
                  rows.queries, kRun<Config::kLoadedQ>, static_cast<int>(rows.heads.divisor));
  auto const out = row_request(params, params.out, params.head_dim_v, kWarpRows,
                               kRun<Config::kHeadDimV>, /*group=*/1);
  ForwardArgs const args{make_tensor_map(q),
                         make_tensor_map(k),
                         make_tensor_map(v),
                         Config::kStoresTiles ? make_tensor_map(out) : TensorMap{},
                         box_keys(params, Config::kBlockN),
                         rows,
                         params,
                         grid,
                         {static_cast<uint32_t>(num_tiles),
                          draws ? counters().of(Counting::Tiles, 1, launch) : nullptr}};
  // After start_max_logits, for whose end only the epilogue waits.
  bool const early = Config::kMaxLogits != MaxLogitsIn::None && params.max_logits.of_heads;
  launch_kernel<forward_kernel<Config>>(
      launch, {blocks, Config::kThreads, kSmemBytes<Config>, /*cluster=*/1, early},
      with_boxes<Config>(args, k, v));
}

template <class Config>
void launch(FwdParams const& params, LaunchContext const& context) {
  if constexpr (Config::kIsAsked) {
    if (params.max_logits.wanted()) {
      return launch_tiles<typename Config::Asked>(params, context);
    }
  }
  launch_tiles<Config>(params, context);
}

// Bytes of unused shared memory: with less, CTAs that start early would crowd on the few SMs that
// the KV splits leave free, and merge there alone.
inline int memory_to_spread(int64_t blocks, DeviceInfo const& device) {
  constexpr int kMost = 8;  // CTAs an SM, up to which that matters
  int64_t const each = (blocks + device.sm_count - 1) / device.sm_count;
  return each > kMost ? 0 : memory_for_at_most(static_cast<int>(each), device);
}

template <class Config>
void launch_merge(FwdParams const& params, LaunchContext const& context) {
  int64_t const blocks = (rows_of_splits(params) + kMergeRows - 1) / kMergeRows;
  LaunchShape const shape{blocks, kMergeRows * 32, memory_to_spread(blocks, context.device),
                          /*cluster=*/1, /*early=*/true};
  if (merges_at_once(params)) {
    return launch_kernel<merge_splits_kernel<Config, true>>(context, shape, params);
  }
  launch_kernel<merge_splits_kernel<Config, false>>(context, shape, params);
}

// Launches a kernel for long tiles of keys in pages, whose boxes have all columns.
template <class Config>
void launch_pages(FwdParams const& params, LaunchContext const& context) {
  if constexpr (has_long_paged_tile(Config::kSecondN, Config::kFp8)) {
    using Small = typename Config::template SecondOf<KeyStorage::SmallPages>;
    using Large = typename Config::template SecondOf<KeyStorage::LargePages>;
    return PageBox::suit(params.pages.page_size.divisor) ? launch<Large>(params, context)
                                                         : launch<Small>(params, context);
  }
  throw std::logic_error("no kernel for long tiles of keys in pages");
}

template <class Config>
void launch_second(FwdParams const& params, LaunchContext const& context) {
  if constexpr (Config::kSecondN > 0) {
    return params.pages.table ? launch_pages<Config>(params, context)
                              : launch<typename Config::Second>(params, context);
  }
  throw std::logic_error("no kernel with a second tile");
}

template <class Config>
void launch_forward(FwdParams const& params, LaunchContext const& context) {
  start_max_logits<Config>(params, context);
  if (params.tile == ForwardTile::First) {
    return launch<Config>(params, context);
  }
  if (params.tile == ForwardTile::Second) {
    return launch_second<Config>(params, context);
  }
  if constexpr (Config::kScores == ScoreLevel::Plain && !Config::kFp8) {
    if (params.tile == ForwardTile::PackGqa) {
      return launch<typename Config::PackGqa>(params, context);
    }
    launch<typename Config::Split>(params, context);
    return launch_merge<typename Config::Split>(params, context);
  }
  throw std::logic_error("no kernel with pack-GQA");
}

}  // namespace flash::sm90::forward
