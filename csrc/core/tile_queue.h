// Which tiles a block of a persistent grid works on.
#pragma once

#include <cstdint>

#include "params/common.h"

namespace flash {

// Every block starts with the tile of its own number. After that it takes each num_blocks-th one,
// or, where there is a counter to share, whichever comes next when it is done with one.
struct TileQueue {
  uint32_t num_tiles;  // at most 2^31 - 1, as many as a grid may have blocks
  // Whether blocks draw their tiles from a counter, which is 0 before and after a launch.
  bool shared;
  // Whether blocks draw their first tile, too, whatever their own number: those that wait for
  // earlier tiles must know that these are in the hands of blocks that run.
  bool first_shared = false;

  template <class Take>
  FLASH_HD uint32_t first(uint32_t block, uint32_t num_blocks, Take take) const {
    return first_shared ? take(last_draw(num_blocks)) : block;
  }

  // The tile after `index`. Take: callable, adds 1 to the counter, or sets it to 0 if it was
  // `last`, and returns what it was before (atomicInc). Blocks that draw until a tile is past the
  // end draw num_tiles times together: num_tiles - num_blocks tiles, and one failure each; and
  // num_blocks times more if they draw their first. So the last draw leaves 0 behind for the next
  // launch.
  template <class Take>
  FLASH_HD uint32_t next(uint32_t index, uint32_t num_blocks, Take take) const {
    uint32_t const not_drawn = first_shared ? 0 : num_blocks;
    return shared ? not_drawn + take(last_draw(num_blocks)) : index + num_blocks;
  }

 private:
  FLASH_HD uint32_t last_draw(uint32_t num_blocks) const {
    return num_tiles - 1 + (first_shared ? num_blocks : 0);
  }
};

}  // namespace flash
