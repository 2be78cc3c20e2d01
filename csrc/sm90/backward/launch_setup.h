// Arguments of a backward kernel and of the passes around it, and the launch of CTAs that draw
// tiles.
#pragma once

#include <algorithm>
#include <type_traits>

#include "sm90/backward/args.h"
#include "sm90/backward/config.h"
#include "sm90/tile_counters.h"

namespace flash::sm90::backward {

// The shape of tensors whose rows are q's, or of those whose rows are k's.
struct Side {
  bool varlen;
  int64_t rows;  // of a batch entry, or of all sequences of a varlen call
  int heads;
  int batch;
  int box_rows;
};

// A tensor without elements may have no address. It gets the keys', which always have some.
inline TensorMap map_of(Side const& side, TensorView<const void> const& view, int columns,
                        int box_columns, TensorView<const void> const& keys) {
  return make_tensor_map({view.ptr ? view : keys, columns, side.rows, side.heads,
                          side.varlen ? 1 : side.batch, side.box_rows, box_columns,
                          side.varlen ? Boxes::EndWithRow : Boxes::EndWithTensor, 1});
}

// The arguments of a launch, without a queue of tiles.
template <class Config>
BackwardArgs backward_args(BwdParams const& params, TileGrid const& grid) {
  Seqlens const& s = params.seqlens;
  Side const rows{s.cu_q != nullptr, s.cu_q ? s.total_q : s.seqlen_q, params.heads_q, s.batch,
                  Config::kBlockM};
  Side const keys{s.cu_k != nullptr, s.cu_k ? s.total_k : s.seqlen_k, params.heads_kv, s.batch,
                  Config::kKeys};
  constexpr int kRunQ = kRun<Config::kHeadDim>, kRunV = kRun<Config::kHeadDimV>;
  auto const delta_map = [&]([[maybe_unused]] TensorView<const void> const& view) -> TensorMap {
    if constexpr (Config::kComputesDelta) {
      if (params.ordered_dq.computes_delta) {
        Side few = rows;
        few.box_rows = Config::kDeltaRows;
        return map_of(few, view, params.head_dim_v, kRunV, params.k);
      }
    }
    return {};
  };
  return {map_of(rows, params.q, params.head_dim, kRunQ, params.k),
          map_of(rows, params.dout, params.head_dim_v, kRunV, params.k),
          map_of(keys, params.k, params.head_dim, Config::kRunK, params.k),
          map_of(keys, params.v, params.head_dim_v, kRunV, params.k),
          delta_map(params.dout),
          delta_map(params.out),
          params,
          grid,
          {},
          NearTanhMod({params.scores.softmax_scale, params.scores.softcap, 0.f, 0})};
}

// Sequences and heads of a KV-persistent call. A varlen batch has more than its sequences: the keys
// that belong to none (see VarlenRows).
inline int64_t num_kv_persistent(BwdParams const& p) {
  Seqlens const& s = p.seqlens;
  return int64_t(s.cu_k ? VarlenRows::count(s.batch) : s.batch) * p.heads_kv * p.gqa.splits;
}

// Calls start(std::type_identity<Config>, args, drawers) if there are tiles. drawers: CTAs, or
// clusters, to launch, which draw the tiles; as many as are resident at a time.
template <class Config, class Start>
void launch_drawing(BwdParams const& params, LaunchContext const& launch, int resident,
                    Start start) {
  TileGrid const grid = backward_grid(params, Config::kBlockN);
  RowSplit const& rows = params.row_split;
  int64_t const num_tiles = Config::kKvPersistent ? num_kv_persistent(params)
                                                  : grid.num_tiles() - rows.tiles + rows.slots();
  if (num_tiles == 0) {
    return;
  }
  check(num_tiles <= max_grid_blocks, num_tiles, " KV blocks in one call, at most ",
        max_grid_blocks, " are served");
  // CTAs that wait for a dQ semaphore wait for tiles before their own, which are running if all
  // tiles are drawn.
  bool const ordered = params.workspace.dq_semaphores != nullptr;
  check(ordered || !Config::kOrderedDq, "ordered dQ without semaphores");
  int64_t const drawers = std::min<int64_t>(num_tiles, resident);
  bool const draws = ordered || num_tiles > drawers;
  BackwardArgs args = backward_args<Config>(params, grid);
  args.queue = {static_cast<uint32_t>(num_tiles),
                draws ? counters().of(Counting::Tiles, 1, launch) : nullptr, ordered};
  start(std::type_identity<Config>{}, args, drawers);
}

// Launches the kernel of the call's schedule, and the passes around it. resident: CTAs, or
// clusters, that run at a time; start: see launch_drawing.
template <class Config, class Start>
void launch_schedule(BwdParams const& params, LaunchContext const& launch, int resident,
                     Start start) {
  using Pass = Passes<typename Config::Element>;
  constexpr QueryTile kTile = query_tile<Config>();
  auto const main = [&] {
    if constexpr (Config::kScores == ScoreLevel::Plain) {
      if (params.kv_persistent.used()) {
        int const persistent = std::min(params.kv_persistent.resident, std::max(resident, 1));
        return launch_drawing<KvPersistentConfig<Config>>(params, launch, persistent, start);
      }
      if (params.ordered_dq.used) {
        return launch_drawing<OrderedDqConfig<Config>>(params, launch, resident, start);
      }
    }
    launch_drawing<Config>(params, launch, resident, start);
  };
  if (params.ordered_dq.computes_delta) {
    Pass::begin_ordered_dq(params, kTile, params.ordered_dq.heads_before, launch);
  } else {
    Pass::preprocess(params, kTile, launch);
  }
  main();
  Pass::postprocess(params, kTile, launch);
  if constexpr (Config::kRowSplit) {
    if (params.row_split.used()) {
      Pass::add_row_splits(params, {backward_grid(params, Config::kBlockN), Config::kBlockN},
                           launch);
    }
  }
}

}  // namespace flash::sm90::backward
