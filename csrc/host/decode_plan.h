// How a call with few query rows is cut up: from the row of the table, the call and the GPU alone,
// never from the lengths, which only the device knows.
#pragma once

#include "core/split_schedule.h"
#include "host/variant.h"
#include "params/decode_params.h"

namespace flash {

// Query rows times heads of a KV head up to which the decode kernel serves a call. It reads the
// keys once per 16 of them; the forward kernel, once per head and 128 rows.
inline constexpr int64_t kMaxDecodeRows = 64;

inline bool is_decode(int64_t seqlen_q, int heads_q, int heads_kv) {
  return seqlen_q * (heads_q / heads_kv) <= kMaxDecodeRows;
}

// num_splits as in flash_attn_with_kvcache: 0 chooses, 1 never cuts, n is a limit.
SplitSchedule decode_schedule(Variant const& variant, FwdParams const& params, int num_splits,
                              DeviceInfo const& device);

// Words of 32 bits that the pieces of the schedule leave behind, and are counted with.
int64_t decode_workspace(Variant const& variant, FwdParams const& params,
                         SplitSchedule const& split);

// The call with its workspace put in place.
DecodeParams decode_params(Variant const& variant, FwdParams const& params,
                           SplitSchedule const& split, float* workspace);

}  // namespace flash
