#pragma once

#include <new>

#include "sm90/backward/delta_warp.h"

namespace flash::sm90::backward {

// The order in which a producer warp announces tiles to the other warps and loads what they need.
// All lanes call its functions together. Loads has load_keys, load_values_of, load_q and load_dout.
template <class Loads, class Config, class Storage>
struct TileLoader {
  using Block = KeyBlock<Config>;
  static constexpr auto kOnce = TMA::CacheHintSm90::EVICT_FIRST;  // K, V
  static constexpr auto kOften = TMA::CacheHintSm90::EVICT_LAST;  // Q, dO
  // The next tile is drawn this many row blocks before the end of a tile: a CTA that draws earlier
  // may be the one that finishes last.
  static constexpr int kAhead = 4;
  static constexpr int kAheadInStream = 2;  // before the last iteration, which starts its scores

  BackwardArgs const& args;
  Storage& smem;
  bool elected;             // the lane that talks to TMA
  uint32_t described = 0;   // KV blocks so far
  uint32_t iterations = 0;  // row blocks so far
  bool followed = false;    // the last tile's last iteration starts the next one's scores

  // An invalid tile, announced last, ends the other warps' loops.
  template <class Tiles>
  __device__ void load_all(Tiles& tiles) {
    describe(tiles.next());
    while (!tiles.over()) {
      if constexpr (Config::kStreamsTiles) {
        load_in_stream(tiles);
      } else {
        load(tiles);
      }
    }
    loads().load_keys(described - 1, false);
  }

 private:
  __device__ Loads& loads() { return static_cast<Loads&>(*this); }

  __device__ void load_values(uint32_t number, bool wanted) {
    smem.v_ring.wait_empty(RingPosition<1>(number));
    Barrier& full = smem.v_ring.full(0);
    if (elected && wanted) {
      loads().load_values_of(smem.key_block(number), full);
    } else if (elected) {
      full.arrive();
    }
  }

  // Loads everything for the KV block that was announced last, and announces the next while
  // consumers compute.
  template <class Tiles>
  __device__ void load(Tiles& tiles) {
    uint32_t const number = described - 1;
    Block const& block = smem.key_block(number);
    int const count = block.range.count(), heads = block.heads;
    if (count == 0) {
      return skip(number, tiles);
    }
    wait_for_rows(block);
    for (int head = 0; head < heads; ++head) {
      for (int step = 0; step < count; ++step) {
        int const m_block = block.range.from_last(step);
        bool const first = head == 0 && step == 0;
        // Rows come first: their buffers are free before those of K and V.
        loads().load_q(block, {block.row_block(head, m_block), head, m_block,
                               block.range.masked(m_block), head + 1 < heads || step + 1 < count});
        if (first) {
          loads().load_keys(number, true);
        }
        loads().load_dout(block, head, m_block);
        if (first) {
          load_values(number, true);
        }
        if (head == heads - 1 && step == max(count - kAhead, 0)) {
          describe(after(block, tiles));
        }
        ++iterations;
      }
    }
  }

  // The same for a stream of tiles: the next one is announced before this one's last iteration,
  // which is to start its scores. K comes with the first Q. V comes after the rows of two
  // iterations: its one buffer is free when the tile before ends.
  template <class Tiles>
  __device__ void load_in_stream(Tiles& tiles) {
    uint32_t const number = described - 1;
    Block const& block = smem.key_block(number);
    int const total = block.heads * block.range.count();
    if (total == 0) {
      return skip(number, tiles);
    }
    wait_for_rows(block);
    bool const led = followed;  // the tile before has started this one's scores
    int left = total;
    block.for_each_iteration([&](int head, int m_block) {
      if (left == min(kAheadInStream, total)) {
        describe(after(block, tiles));
      }
      if (left == 1) {
        // A tile's only iteration cannot both add the last dQ of the tile before and start the next
        // tile's scores: the K of both would be in the same buffer.
        followed = next_has_rows() && !(total == 1 && led);
      }
      RowIteration const rows{block.row_block(head, m_block), head,     m_block,
                              block.range.masked(m_block),    left > 1, left == 1 && followed};
      loads().load_q(block, rows, left == total);
      loads().load_dout(block, head, m_block);
      if (left == max(total - 1, 1)) {
        load_values(number, true);
      }
      ++iterations;
      --left;
    });
  }

  // Waits for D, which comes with a tile's Q. Here, before the tile's loop, the wait costs
  // consumers nothing (docs/lab/sm90_backward_delta_warp.md).
  __device__ void wait_for_rows(Block const& block) const {
    if constexpr (Config::kComputesDelta) {
      if (args.params.ordered_dq.computes_delta) {
        wait_for_delta(args.params, block);
      }
    }
  }

  // Skips a tile without rows.
  template <class Tiles>
  __device__ void skip(uint32_t number, Tiles& tiles) {
    loads().load_keys(number, false);
    load_values(number, false);
    describe(after(smem.key_block(number), tiles));
  }

  // Whether the tile that was announced last has rows.
  __device__ bool next_has_rows() const {
    Block const& next = smem.key_block(described - 1);
    return next.tile.valid && next.range.count() > 0;
  }

  // The tile after `block`: in a KV-persistent call its next KV block, if it has one.
  template <class Tiles>
  __device__ KeyTile<Config> after(Block const& block, Tiles& tiles) {
    if constexpr (Config::kKvPersistent) {
      if (block.slots > Config::kBlockN) {
        return {block.tile.m_block + 1, block.tile.head, block.tile.batch, true};
      }
    }
    return tiles.next();
  }

  __device__ void describe(KeyTile<Config> const& tile) {
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
};

}  // namespace flash::sm90::backward
