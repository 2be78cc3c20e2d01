// The loading warp: keeps K, V, Q and dO coming.
#pragma once

#include "sm90/backward/args.h"
#include "sm90/paired_backward/shared_storage.h"

namespace flash::sm90 {

// All lanes call its functions together.
template <class Config>
struct PairedLoader {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  using Block = KeyBlock<Config>;
  static constexpr auto kOnce = TMA::CacheHintSm90::EVICT_FIRST;  // K, V
  static constexpr auto kOften = TMA::CacheHintSm90::EVICT_LAST;  // Q, dO

  BackwardArgs const& args;
  PairedStorage<Config>& smem;
  Block const& block;
  uint32_t rank;
  bool elected;  // the lane that talks to TMA

  __device__ void load() {
    int const count = block.range.count(), heads = block.heads;
    uint32_t visits = 0;
    for (int head = 0; head < heads; ++head) {
      for (int step = 0; step < count; ++step, ++visits) {
        int const m_block = block.range.from_last(step);
        load_q(Position(visits), head, m_block);
        if (visits == 0) {
          load_keys();
        }
        load_dout(Position(visits), head, m_block);
        if (visits == 0) {
          load_values();
        }
      }
    }
  }

 private:
  // The pair's keys that are those of one of its blocks.
  __device__ TileCoord keys_of(uint32_t of) const {
    int const first = static_cast<int>(of) * Config::kKeys;
    TileCoord const& all = block.keys_at;
    return {all.row + first, min(max(all.rows - first, 0), Config::kKeys), all.head, all.batch};
  }

  __device__ void load_keys() {
    if (elected) {
      Barrier& full = smem.k_ring.full(0);
      full.arrive_and_expect_tx((Config::kTileK + Config::kTileHalfK) * sizeof(Element));
      load_tile<Config::kKeys, Config::kHeadDim, Config::kRunK>(args.k, keys_of(rank), smem.k, full,
                                                                kOnce);
      load_tile<Config::kKeys, Config::kQueryColumns, Config::kRunK>(
          args.k, keys_of(1 - rank), smem.other_k, full, kOnce, rank * Config::kQueryColumns);
    }
  }

  __device__ void load_values() {
    if (elected) {
      Barrier& full = smem.v_ring.full(0);
      full.arrive_and_expect_tx(Config::kTileV * sizeof(Element));
      load_tile<Config::kKeys, Config::kHeadDimV>(args.v, keys_of(rank), smem.v, full, kOnce);
    }
  }

  // With the rows' LSE and D.
  __device__ void load_q(Position at, int head, int m_block) {
    using Stats = RowStats<Config::kBlockM>;
    smem.q_ring.wait_empty(at);
    if (elected) {
      Barrier& full = smem.q_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTileQ * sizeof(Element) + sizeof(Stats));
      load_tile_for_pair<Config::kBlockM, Config::kHeadDim>(
          rank, args.q, block.rows_at(head, m_block), smem.q[at.stage], full, kOften);
      SM90_BULK_COPY_G2S::copy(
          args.params.workspace.stats + block.row_block(head, m_block) * (2 * Config::kBlockM),
          reinterpret_cast<uint64_t*>(&full), &smem.stats[at.stage], sizeof(Stats));
    }
  }

  __device__ void load_dout(Position at, int head, int m_block) {
    smem.dout_ring.wait_empty(at);
    if (elected) {
      Barrier& full = smem.dout_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTileDO * sizeof(Element));
      load_tile_for_pair<Config::kBlockM, Config::kHeadDimV>(
          rank, args.dout, block.rows_at(head, m_block), smem.dout[at.stage], full, kOften);
    }
  }
};

}  // namespace flash::sm90
