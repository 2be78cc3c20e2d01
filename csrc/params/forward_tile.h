#pragma once

namespace flash {

// The kernels of a forward variant: what a row block is, and how many keys it takes in a step.
enum class ForwardTile {
  First,    // queries of one query head, the variant's block_n keys
  Second,   // the same, second_block_n keys
  PackGqa,  // pack-GQA: queries with all heads that share a KV head, block_n keys
  Split,    // pack-GQA whose keys are cut into splits, which are merged by a launch of their own
};

// A kernel of at most so many keys a tile loads rows and pages; a longer tile has a second kernel,
// for pages.
constexpr int kMostPagedKeys = 128;

// Whether a variant with such a second tile has a kernel of its own for long tiles of pages.
constexpr bool has_long_paged_tile(int second_block_n, bool query_codes) {
  return second_block_n > kMostPagedKeys && !query_codes;
}

// The fewest rows of a TMA box: a swizzle pattern repeats after so many. Pages that boxes load are
// a multiple of it.
constexpr int kLeastBoxRows = 8;

}  // namespace flash
