#pragma once

namespace flash {

// A cluster that computes one tile of decoding has at most 2^4 = 16 CTAs. Hopper allows these; the
// size that is portable to every GPU is smaller.
constexpr int kMostClusterLog2 = 4;

// CTAs of an SM that the registers of the kernel for clusters allow.
constexpr int kMostClusterBlocks = 2;

}  // namespace flash
