// Numbers the row blocks of all sequences, for workspaces that hold whole blocks.
#pragma once

#include "core/work_tile.h"
#include "params/seqlens.h"

namespace flash {

struct RowBlocks {
  int block_m;

  // The first block of the sequence whose first row is row_q. It is the same bound as
  // VarlenSchedule's, so no prefix sum is needed.
  FLASH_HD int64_t first(const Seqlens& s, int sequence, int64_t row_q) const {
    return s.cu_q ? row_q / block_m + sequence
                  : int64_t(sequence) * num_m_blocks(s.seqlen_q, block_m);
  }

  // Includes room for rows behind the last sequence, but none for rows before the first.
  FLASH_HD int64_t count(const Seqlens& s) const {
    return s.cu_q ? first(s, s.batch + 1, s.total_q) : first(s, s.batch, 0);
  }
};

}  // namespace flash
