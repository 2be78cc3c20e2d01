#pragma once

namespace flash {

// A cluster that computes one tile of decoding has at most 2^4 = 16 CTAs. Hopper allows these; the
// size that is portable to every GPU is smaller.
constexpr int kMostClusterLog2 = 4;

}  // namespace flash
