// The producer warp of a CTA of a pair: keeps K, V, Q and dO coming.
#pragma once

#include "sm90/backward/tile_loader.h"
#include "sm90/paired_backward/shared_storage.h"

namespace flash::sm90::backward {

// All lanes call its functions together.
template <class Config>
struct PairedLoader : TileLoader<PairedLoader<Config>, Config, PairedStorage<Config>> {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  using Base = TileLoader<PairedLoader<Config>, Config, PairedStorage<Config>>;
  using Base::args, Base::smem, Base::elected, Base::iterations, Base::kOnce, Base::kOften;
  using typename Base::Block;

  uint32_t rank;

  // The keys, among the pair's, of CTA `of`.
  __device__ TileCoord keys_of(Block const& block, uint32_t of) const {
    int const first = static_cast<int>(of) * Config::kKeys;
    TileCoord const& all = block.keys_at;
    return {all.row + first, min(max(all.rows - first, 0), Config::kKeys), all.head, all.batch};
  }
  __device__ TileCoord own_keys(Block const& block) const { return keys_of(block, rank); }

  // K's arrival also announces the KV block.
  __device__ void load_keys(uint32_t number, bool wanted) {
    smem.k_ring.wait_empty(RingPosition<1>(number));
    Barrier& full = smem.k_ring.full(0);
    if (elected && wanted) {
      Block const& block = smem.key_block(number);
      full.arrive_and_expect_tx((Config::kTileK + Config::kTileHalfK) * sizeof(Element));
      load_tile<Config::kKeys, Config::kHeadDim, Config::kRunK>(args.k, own_keys(block), smem.k,
                                                                full, kOnce);
      load_tile<Config::kKeys, Config::kQueryColumns, Config::kRunK>(
          args.k, keys_of(block, 1 - rank), smem.other_k, full, kOnce,
          rank * Config::kQueryColumns);
    } else if (elected) {
      full.arrive();
    }
  }

  // Q comes with the rows' LSE and D, and its arrival also announces the iteration.
  __device__ void load_q(Block const& block, RowIteration const& rows) {
    using Stats = RowStats<Config::kBlockM>;
    RingPosition<Config::kQStages> const at(iterations);
    smem.q_ring.wait_empty(at);
    if (elected) {
      if constexpr (Config::kOrdersDq) {
        smem.dq_iteration(iterations) = dq_iteration(args.params, block, rows);
      }
      Barrier& full = smem.q_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTileQ * sizeof(Element) + sizeof(Stats));
      load_tile_for_pair<Config::kBlockM, Config::kHeadDim>(
          rank, args.q, block.rows_at(rows.head, rows.m_block), smem.q[at.stage], full, kOften);
      SM90_BULK_COPY_G2S::copy(args.params.workspace.stats + rows.row_block * (2 * Config::kBlockM),
                               reinterpret_cast<uint64_t*>(&full), &smem.stats[at.stage],
                               sizeof(Stats));
    }
  }

  __device__ void load_dout(Block const& block, int head, int m_block) {
    Position const at(iterations);
    smem.dout_ring.wait_empty(at);
    if (elected) {
      Barrier& full = smem.dout_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTileDO * sizeof(Element));
      load_tile_for_pair<Config::kBlockM, Config::kHeadDimV>(
          rank, args.dout, block.rows_at(head, m_block), smem.dout[at.stage], full, kOften);
    }
  }
};

}  // namespace flash::sm90::backward
