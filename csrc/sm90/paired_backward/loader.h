// The producer warp of a CTA: keeps K, V, Q and dO coming.
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

  CtaPart<Config> part;

  // Where runs of columns end that a tensor of `columns` columns has, in a tile of which `first` is
  // the first column. Those after are zeros from the start (clear_tiles): TMA writes zeros slowly.
  template <int kColumns, int kRunColumns = kRun<kColumns>>
  __device__ static int columns_end(int columns, int first) {
    if constexpr (Config::kSplitsColumns) {
      return min(max(ceil_div(columns - first, kRunColumns), 0) * kRunColumns, kColumns);
    } else {
      return kColumns;
    }
  }

  // The keys, among the pair's, of CTA `of`.
  __device__ TileCoord keys_of(Block const& block, uint32_t of) const {
    int const first = static_cast<int>(of) * Config::kKeys;
    TileCoord const& all = block.keys_at;
    return {all.row + first, min(max(all.rows - first, 0), Config::kKeys), all.head, all.batch};
  }
  __device__ TileCoord own_keys(Block const& block) const {
    return keys_of(block, part.key_half());
  }

  __device__ void load_values_of(Block const& block, Barrier& full) const {
    int const first = part.first_column_v();
    int const end = columns_end<Config::kColumnsV>(args.params.head_dim_v, first);
    full.arrive_and_expect_tx(Config::kKeys * end * sizeof(Element));
    load_tile<Config::kKeys, Config::kColumnsV>(args.v, own_keys(block), smem.v, full, kOnce, first,
                                                end);
  }

  // K's arrival also announces the KV block.
  __device__ void load_keys(uint32_t number, bool wanted) {
    smem.k_ring.wait_empty(RingPosition<1>(number));
    Barrier& full = smem.k_ring.full(0);
    if (elected && wanted) {
      Block const& block = smem.key_block(number);
      int const first = part.first_column();
      int const first_of_dq = first + static_cast<int>(part.key_half()) * Config::kQueryColumns;
      int const end = columns_end<Config::kColumns, Config::kRunK>(args.params.head_dim, first);
      int const end_of_dq =
          columns_end<Config::kQueryColumns, Config::kRunK>(args.params.head_dim, first_of_dq);
      full.arrive_and_expect_tx(Config::kKeys * (end + end_of_dq) * sizeof(Element));
      load_tile<Config::kKeys, Config::kColumns, Config::kRunK>(args.k, own_keys(block), smem.k,
                                                                full, kOnce, first, end);
      load_tile<Config::kKeys, Config::kQueryColumns, Config::kRunK>(
          args.k, keys_of(block, 1 - part.key_half()), smem.other_k, full, kOnce, first_of_dq,
          end_of_dq);
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
      int const end = columns_end<Config::kColumns>(args.params.head_dim, part.first_column());
      full.arrive_and_expect_tx(Config::kBlockM * end * sizeof(Element) + sizeof(Stats));
      load_tile_for_pair<Config::kBlockM, Config::kColumns>(
          of_pair(), args.q, block.rows_at(rows.head, rows.m_block), smem.q[at.stage], full, kOften,
          part.first_column(), end);
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
      int const end = columns_end<Config::kColumnsV>(args.params.head_dim_v, part.first_column_v());
      full.arrive_and_expect_tx(Config::kBlockM * end * sizeof(Element));
      load_tile_for_pair<Config::kBlockM, Config::kColumnsV>(
          of_pair(), args.dout, block.rows_at(head, m_block), smem.dout[at.stage], full, kOften,
          part.first_column_v(), end);
    }
  }

 private:
  __device__ OneOfPair of_pair() const { return {part.key_half(), part.pair_begin()}; }
};

}  // namespace flash::sm90::backward
