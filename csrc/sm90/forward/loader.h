// The producer warp: loads Q, K and V ahead of their use.
#pragma once

#include "sm90/forward/pages.h"

namespace flash::sm90::forward {

// All lanes call its functions together.
template <class Config>
struct Loader {
  using Loaded = typename Config::Loaded;
  using Block = RowBlock<Config>;
  // The next row block is asked for this many KV blocks before the end of one, in time for its
  // first keys.
  static constexpr int kAhead = 4;

  ForwardArgs const& args;
  SharedStorage<Config>& smem;
  bool elected;         // the lane that issues TMA loads
  uint32_t blocks = 0;  // KV blocks so far

  __device__ void run() {
    for (uint32_t number = 0;; ++number) {
      smem.described.wait_full(typename SharedStorage<Config>::Description(number));
      Block const& block = smem.row_block(number);
      if (!block.tile.valid) {
        load_q(block, number);
        return;
      }
      load(block, number);
    }
  }

 private:
  __device__ void load(Block const& block, uint32_t number) {
    // Two other warps load keys from pages, but with kFp8.
    bool const elsewhere = Config::kPagesOnly || (args.params.pages.table && !Config::kFp8);
    int const steps = elsewhere ? 0 : block.range.count();
    int const asks_at = steps - kAhead;
    if (asks_at <= 0) {
      ask();
    }
    // K is one KV block ahead of V. Q has to wait for its only buffer, the first keys do not.
    for (int step = 0; step <= steps; ++step) {
      if (step < steps) {
        load_keys<Config::kLoadedK>(args.k, block, step, smem.loaded_k_ring(), smem.loaded_k(),
                                    /*of_k=*/true);
      }
      if (step == 0) {
        load_q(block, number);
      } else {
        load_keys<Config::kLoadedV>(args.v, block, step - 1, smem.loaded_v_ring(), smem.loaded_v(),
                                    /*of_k=*/false);
      }
      if (step == asks_at && asks_at > 0) {
        ask();
      }
    }
    blocks += steps;
  }

  // Asks the scheduler warp for the next row block.
  __device__ void ask() {
    if (elected) {
      smem.asked.full(0).arrive();
    }
  }

  // Q's arrival also announces the row block to consumers.
  __device__ void load_q(Block const& block, uint32_t number) {
    int const queries = args.rows.template queries_of<Config>();
    int const rows_filled =
        Config::kPackGqa ? queries * static_cast<int>(args.rows.heads.divisor) : kWarpgroupRows;
    bool const has_keys = block.tile.valid && block.range.count() > 0;
#pragma unroll 1
    for (int i = 0; i < Config::kConsumers; ++i) {
      smem.q_ring[i].wait_empty(RingPosition<1>(number));
      if (!elected) {
        continue;
      }
      Barrier& full = smem.q_ring[i].full(0);
      if (has_keys) {
        full.arrive_and_expect_tx(rows_filled * Config::kLoadedQ * sizeof(Loaded));
        constexpr int kTile = kWarpgroupRows * Config::kLoadedQ;
        load_tile<kWarpgroupRows, Config::kLoadedQ>(args.q, part(block.q_at, i, queries),
                                                    reinterpret_cast<Loaded*>(smem.q) + i * kTile,
                                                    full, TMA::CacheHintSm90::EVICT_FIRST);
      } else {
        full.arrive();
      }
    }
  }

  // The i-th `rows` rows of `all`, or as many as there are.
  __device__ static TileCoord part(TileCoord const& all, int i, int rows) {
    int const first = i * rows;
    return {all.row + first, min(max(all.rows - first, 0), rows), all.head, all.batch};
  }

  __device__ static TileCoord keys(Block const& block, int step) {
    return part(block.keys_at, block.range.block_at(step), Config::kBlockN);
  }

  template <int kColumns, int kStages, int kTile>
  __device__ void load_keys(TensorMap const& map, Block const& block, int step, Ring<kStages>& ring,
                            Loaded (&buffers)[kStages][kTile], bool of_k) {
    if constexpr (Config::kFp8 && Config::kServesPages) {
      if (args.params.pages.table) {
        return PageLoader<Config, kStages, kTile>{args, smem, map, nullptr, ring, buffers, of_k}
            .load(block, step, blocks + step, elected);
      }
    }
    RingPosition<kStages> const at(blocks + step);
    ring.wait_empty(at);
    if (elected) {
      Barrier& full = ring.full(at.stage);
      full.arrive_and_expect_tx(kTile * sizeof(Loaded));
      load_tile<Config::kBlockN, kColumns>(map, keys(block, step), buffers[at.stage], full,
                                           TMA::CacheHintSm90::EVICT_LAST);
    }
  }
};

}  // namespace flash::sm90::forward
