// A batch whose long sequences the forward kernel has, and whose short ones the decode kernel has
// at the same time: the one is about products, the other about memory, so that side by side they
// take little longer than the slower one alone. A thread block of the forward's has its
// multiprocessor for itself, and decode gets the others: the forward takes no more of them than it
// needs to be done when decode is.
#pragma once

#include <cmath>

#include "params/common.h"

namespace flash {

// What there is to do, by the lengths on the device.
struct MixedWork {
  float tile_keys = 0.f;  // keys of all tiles of the forward's
  float tiles = 0.f;
  float decode_keys = 0.f;  // keys, of all KV heads, that decode reads
};

// How many of `most` thread blocks, one a multiprocessor, the forward gets. rows: of its tiles.
FLASH_HD int forward_blocks(MixedWork const& work, int rows, int most) {
  // A tile goes through a key in the time in which all of the GPU reads 0.9 times as many keys as
  // the tile has rows: 4.7 TFLOP/s a multiprocessor and 4.2 TB/s, whatever the head dim. While
  // others read at full speed it takes half as long again.
  float const time = 1.3f * float(rows) * work.tile_keys;  // of one multiprocessor
  float const other = work.decode_keys;
  if (other == 0.f) {
    return most;
  }
  // So many multiprocessors, or three eighths of an H200's, read at full speed; fewer as much less.
  float const reading = 0.375f * float(most);
  float const even = time / other;
  float const blocks =
      even <= float(most) - reading ? even : time * float(most) / (time + other * reading);
  // Tiles are whole: as many blocks as have them in so many rounds.
  float const rounds = floorf(work.tiles / fmaxf(blocks, 1.f));
  float const whole = rounds >= 1.f ? ceilf(work.tiles / rounds) : blocks;
  // An estimate that is wrong, or tiles that only turn out not to be any, take some, too.
  float const least = float(most / 8 + 1);
  return int(fminf(fmaxf(whole, least), float(most)));
}

}  // namespace flash
