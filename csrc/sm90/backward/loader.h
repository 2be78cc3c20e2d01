// The loading warp: finds tiles, describes them to the others, and keeps K, V, Q and dO coming.
#pragma once

#include <new>

#include "sm90/backward/args.h"
#include "sm90/backward/shared_storage.h"

namespace flash::sm90 {

// All lanes call its functions together.
template <class Config>
struct Loader {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  using Block = KeyBlock<Config>;
  static constexpr auto kOnce = TMA::CacheHintSm90::EVICT_FIRST;  // K, V
  static constexpr auto kOften = TMA::CacheHintSm90::EVICT_LAST;  // Q, dO
  // Row blocks before the end of a tile at which the next is drawn: who draws earlier may be the
  // one who is done last.
  static constexpr int kAhead = 4;

  BackwardArgs const& args;
  SharedStorage<Config>& smem;
  bool elected;            // the lane that talks to TMA
  uint32_t described = 0;  // key blocks so far
  uint32_t visits = 0;     // row blocks so far

  // Everything about the key block that was described last, if there is one, and the description
  // of the next, of `next_tile`, while the others compute.
  template <class NextTile>
  __device__ void load(NextTile next_tile) {
    if (described == 0) {
      describe(next_tile());
      return;
    }
    uint32_t const number = described - 1;
    Block const& block = smem.key_block(number);
    int const count = block.range.count(), heads = block.heads;
    if (count == 0) {
      load_keys(number, false);
      load_values(number, false);
      describe(next_tile());
      return;
    }
    for (int head = 0; head < heads; ++head) {
      for (int step = 0; step < count; ++step) {
        int const m_block = block.range.from_last(step);
        bool const first = head == 0 && step == 0;
        // Rows have buffers that are free before K's and V's are.
        load_q(block, {block.row_block(head, m_block), head, m_block, block.range.masked(m_block),
                       head + 1 < heads || step + 1 < count});
        if (first) {
          load_keys(number, true);
        }
        load_dout(block, head, m_block);
        if (first) {
          load_values(number, true);
        }
        if (head == heads - 1 && step == max(count - kAhead, 0)) {
          describe(next_tile());
        }
        ++visits;
      }
    }
  }

  // A tile that is not valid, described last, ends the others' loops.
  __device__ void end() { load_keys(described - 1, false); }

 private:
  __device__ void describe(WorkTile const& tile) {
    if (elected) {
      if (tile.valid) {
        new (&smem.key_block(described)) Block(args, tile, described);
      } else {
        smem.key_block(described).tile.valid = false;
      }
      compiler_fence();
    }
    __syncwarp();
    ++described;
  }

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
      smem.row_visit(visits) = rows;
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
