#pragma once

namespace flash {

// A cluster that computes one tile of decoding has at most 2^4 = 16 CTAs. Hopper allows these; the
// size that is portable to every GPU is smaller.
constexpr int kMostClusterLog2 = 4;

// So many CTAs of the decode kernel for clusters fit an SM's registers.
constexpr int kMostClusterBlocks = 2;

}  // namespace flash
