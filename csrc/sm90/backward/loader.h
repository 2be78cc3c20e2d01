// The producer warp: draws tiles, announces them to the other warps, and keeps K, V, Q and dO
// coming.
#pragma once

#include "sm90/backward/shared_storage.h"
#include "sm90/backward/tile_loader.h"

namespace flash::sm90::backward {

// All lanes call its functions together.
template <class Config>
struct Loader : TileLoader<Loader<Config>, Config, SharedStorage<Config>> {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  using DoutPosition = RingPosition<Config::kDoutStages>;
  using KeyPosition = RingPosition<Config::kKeyStages>;
  using Base = TileLoader<Loader<Config>, Config, SharedStorage<Config>>;
  using Base::args, Base::smem, Base::elected, Base::iterations, Base::kOnce, Base::kOften;
  using typename Base::Block;

  // K's arrival also announces the KV block.
  __device__ void load_keys(uint32_t number, bool wanted) {
    KeyPosition const at(number);
    smem.k_ring.wait_empty(at);
    Barrier& full = smem.k_ring.full(at.stage);
    if (elected && wanted) {
      full.arrive_and_expect_tx(Config::kTileK * sizeof(Element));
      load_keys_of(smem.key_block(number), at, full);
    } else if (elected) {
      full.arrive();
    }
  }

  __device__ void load_values_of(Block const& block, Barrier& full) const {
    full.arrive_and_expect_tx(Config::kTileV * sizeof(Element));
    load_tile<Config::kBlockN, Config::kHeadDimV>(args.v, block.keys_at, smem.v, full, kOnce);
  }

  // Q comes with the rows' LSE and D, and its arrival also announces the iteration. with_keys: K
  // comes with it, too, and K's own arrival only announces the KV block, as soon as there is a
  // buffer.
  __device__ void load_q(Block const& block, RowIteration const& rows, bool with_keys = false) {
    using Stats = RowStats<Config::kBlockM>;
    Position const at(iterations);
    KeyPosition const keys_at(block.number);
    smem.q_ring.wait_empty(at);
    if (with_keys) {
      smem.k_ring.wait_empty(keys_at);
    }
    if (elected) {
      if constexpr (Config::kOrdersDq) {
        smem.row_iteration(iterations) = dq_iteration(args.params, block, rows);
      } else {
        smem.row_iteration(iterations) = rows;
      }
      Barrier& full = smem.q_ring.full(at.stage);
      int const elements = Config::kTileQ + (with_keys ? Config::kTileK : 0);
      full.arrive_and_expect_tx(elements * sizeof(Element) + sizeof(Stats));
      if (with_keys) {
        load_keys_of(block, keys_at, full);
        smem.k_ring.full(keys_at.stage).arrive();
      }
      load_tile<Config::kBlockM, Config::kHeadDim>(args.q, block.rows_at(rows.head, rows.m_block),
                                                   smem.q[at.stage], full, kOften);
      SM90_BULK_COPY_G2S::copy(args.params.workspace.stats + rows.row_block * (2 * Config::kBlockM),
                               reinterpret_cast<uint64_t*>(&full), &smem.stats[at.stage],
                               sizeof(Stats));
    }
  }

  __device__ void load_dout(Block const& block, int head, int m_block) {
    DoutPosition const at(iterations);
    smem.dout_ring.wait_empty(at);
    if (elected) {
      Barrier& full = smem.dout_ring.full(at.stage);
      full.arrive_and_expect_tx(Config::kTileDO * sizeof(Element));
      load_tile<Config::kBlockM, Config::kHeadDimV>(args.dout, block.rows_at(head, m_block),
                                                    smem.dout[at.stage], full, kOften);
    }
  }

 private:
  __device__ void load_keys_of(Block const& block, KeyPosition const& at, Barrier& full) {
    load_tile<Config::kBlockN, Config::kHeadDim>(args.k, block.keys_at, smem.k[at.stage], full,
                                                 kOnce);
  }
};

}  // namespace flash::sm90::backward
