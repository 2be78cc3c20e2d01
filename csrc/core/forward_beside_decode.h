// How a batch shares the GPU when the forward kernel computes its long sequences and the decode
// kernel its short ones at the same time. The forward is bound by products, decode by memory, so
// side by side they take little longer than the slower one alone. A CTA of the forward has its
// SM for itself, and decode gets the others: the forward takes no more of them than it
// needs to be done when decode is.
#pragma once

#include <cmath>

#include "params/common.h"

namespace flash {

// The work of both kernels, from the lengths on the device.
struct MixedWork {
  float tile_keys = 0.f;  // keys of all tiles of the forward
  float tiles = 0.f;
  float decode_keys = 0.f;  // keys that decode reads, of all KV heads
};

// How many of `most` CTAs, one an SM, the forward gets. rows: of one of its tiles.
FLASH_HD int forward_blocks(MixedWork const& work, int rows, int most) {
  // In the time in which a tile computes one key, the whole GPU reads 0.9 times as many keys as the
  // tile has rows: 4.7 TFLOP/s an SM and 4.2 TB/s, whatever the head dim. While other
  // SMs read at full speed, the tile takes half as long again.
  float const time = 1.3f * float(rows) * work.tile_keys;  // on one SM
  float const other = work.decode_keys;
  if (other == 0.f) {
    return most;
  }
  // Three eighths of an H200's SMs read at full speed, fewer in proportion less
  // (docs/lab/decode_varlen_overlap.md).
  float const reading = 0.375f * float(most);
  float const even = time / other;
  float const blocks =
      even <= float(most) - reading ? even : time * float(most) / (time + other * reading);
  // Tiles are whole: take as many CTAs as need the same number of waves for them.
  float const rounds = floorf(work.tiles / fmaxf(blocks, 1.f));
  float const whole = rounds >= 1.f ? ceilf(work.tiles / rounds) : blocks;
  // At least an eighth: the estimate may be wrong, and surplus tiles, which turn out to be empty,
  // take time as well.
  float const least = float(most / 8 + 1);
  return int(fminf(fmaxf(whole, least), float(most)));
}

}  // namespace flash
