// Which tiles a CTA of a persistent grid works on.
#pragma once

#include "params/common.h"

namespace flash {

// Every CTA starts with the tile of its own number. Whenever it is done with a tile, it draws the
// next one.
struct TileQueue {
  uint32_t num_tiles;  // at most 2^31 - 1, as many as a grid may have blocks
  // CTAs draw from it; 0 before and after a launch. Null: there are no more tiles than CTAs.
  uint32_t* counter;
  // Whether CTAs draw their first tile, too, whatever their own number. So the tiles before a
  // CTA's, if it waits for them, belong to CTAs that run.
  bool draws_first = false;

  // Take: callable with `last`, adds 1 to the counter, or sets it to 0 if it was `last`, and
  // returns its value before (atomicInc).
  template <class Take>
  FLASH_HD uint32_t first(uint32_t block, uint32_t num_blocks, Take take) const {
    return draws_first ? take(last_draw(num_blocks)) : block;
  }

  // CTAs draw until a tile is past the end, together num_tiles times: num_tiles - num_blocks tiles
  // and one failure each, and num_blocks times more if they draw their first tile. So the last draw
  // leaves 0 for the next launch.
  template <class Take>
  FLASH_HD uint32_t next(uint32_t num_blocks, Take take) const {
    uint32_t const not_drawn = draws_first ? 0 : num_blocks;
    return counter ? not_drawn + take(last_draw(num_blocks)) : num_tiles;
  }

 private:
  FLASH_HD uint32_t last_draw(uint32_t num_blocks) const {
    return num_tiles - 1 + (draws_first ? num_blocks : 0);
  }
};

}  // namespace flash
