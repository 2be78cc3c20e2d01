// The loading warp: finds tiles, describes them to the others, and keeps K, V, Q and dO coming.
#pragma once

#include "sm90/backward/columns.h"
#include "sm90/backward/shared_storage.h"
#include "sm90/backward/tile_loader.h"

namespace flash::sm90 {

// All lanes call its functions together.
template <class Config>
struct Loader : TileLoader<Loader<Config>, Config, SharedStorage<Config>> {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  using Block = KeyBlock<Config>;
  using Base = TileLoader<Loader<Config>, Config, SharedStorage<Config>>;
  using Base::args, Base::smem, Base::elected, Base::visits;
  static constexpr auto kOnce = TMA::CacheHintSm90::EVICT_FIRST;  // K, V
  static constexpr auto kOften = TMA::CacheHintSm90::EVICT_LAST;  // Q, dO

  // Its arrival also announces the description.
  __device__ void load_keys(uint32_t number, bool wanted) {
    smem.k_ring.wait_empty(RingPosition<1>(number));
    Barrier& full = smem.k_ring.full(0);
    if (elected && wanted) {
      full.arrive_and_expect_tx(Config::kTileK * sizeof(Element));
      load_tile<Config::kBlockN, Config::kHeadDim>(args.k, smem.key_block(number).keys_at, smem.k,
                                                   full, kOnce);
    } else if (elected) {
      full.arrive();
    }
  }

  __device__ void load_values(uint32_t number, bool wanted) {
    smem.v_ring.wait_empty(RingPosition<1>(number));
    Barrier& full = smem.v_ring.full(0);
    if (elected && wanted) {
      full.arrive_and_expect_tx(Config::kTileV * sizeof(Element));
      load_tile<Config::kBlockN, Config::kHeadDimV>(args.v, smem.key_block(number).keys_at, smem.v,
                                                    full, kOnce);
    } else if (elected) {
      full.arrive();
    }
  }

  // With the rows' LSE and D. Its arrival also announces the visit.
  __device__ void load_q(Block const& block, RowVisit const& rows) {
    using Stats = RowStats<Config::kBlockM>;
    Position const at(visits);
    smem.q_ring.wait_empty(at);
    if (elected) {
      if constexpr (Config::kHasSteps) {
        smem.row_visit(visits) = step_visit(args.params, block, rows);
      } else {
        smem.row_visit(visits) = rows;
      }
      Barrier& full = smem.q_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTileQ * sizeof(Element) + sizeof(Stats));
      load_tile<Config::kBlockM, Config::kHeadDim>(args.q, block.rows_at(rows.head, rows.m_block),
                                                   smem.q[at.stage], full, kOften);
      SM90_BULK_COPY_G2S::copy(args.params.workspace.stats + rows.row_block * (2 * Config::kBlockM),
                               reinterpret_cast<uint64_t*>(&full), &smem.stats[at.stage],
                               sizeof(Stats));
    }
  }

  __device__ void load_dout(Block const& block, int head, int m_block) {
    Position const at(visits);
    smem.dout_ring.wait_empty(at);
    if (elected) {
      Barrier& full = smem.dout_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTileDO * sizeof(Element));
      load_tile<Config::kBlockM, Config::kHeadDimV>(args.dout, block.rows_at(head, m_block),
                                                    smem.dout[at.stage], full, kOften);
    }
  }
};

}  // namespace flash::sm90
