// Descales of codes of 8 bits (e4m3), of a cache or of a forward's Q, K and V: a number is its code
// times its descale.
#pragma once

#include "params/common.h"

namespace flash {

// The descales of Q, K or V: `all`, times a number for each sequence and KV head, or for each row
// of the cache and KV head.
struct Descale {
  float const* ptr;      // null: `all` alone
  int64_t batch_stride;  // from sequence to sequence; of rows, as the cache's (TensorView)
  int64_t row_stride;
  int64_t head_stride;
  bool of_rows;
  float all;

  FLASH_HD float of_head(int sequence, int head) const {
    return ptr && !of_rows ? all * ptr[sequence * batch_stride + head * head_stride] : all;
  }

  // The factor between a row's descale and its head's; null: rows have none.
  FLASH_HD float const* of_row(int page, int64_t row, int head) const {
    return of_rows ? ptr + page * batch_stride + row * row_stride + head * head_stride : nullptr;
  }
};

struct CodeDescales {
  bool used;      // K and V are codes
  bool of_q;      // and Q
  bool bf16_out;  // whether O is bf16, or fp16; only if Q is codes
  Descale q;
  Descale k;
  Descale v;
};

}  // namespace flash
