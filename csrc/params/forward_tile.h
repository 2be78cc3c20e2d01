#pragma once

namespace flash {

// What a row block of a forward is, and how many keys it takes at a step. Each is a kernel of the
// variant's row.
enum class ForwardTile {
  First,   // rows of one query head, the row's block_n keys
  Second,  // the same, second_block_n keys
  Packed,  // pack-GQA: queries with all heads that share a KV head, block_n keys
  Split,   // pack-GQA whose keys are cut into splits, which are merged by a launch of their own
};

}  // namespace flash
