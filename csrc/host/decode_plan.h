// How a call with few query rows is cut up: from the row of the table, the call and the GPU alone,
// never from the lengths, which only the device knows.
#pragma once

#include "core/split_schedule.h"
#include "host/variant.h"
#include "params/decode_params.h"

namespace flash {

// Whether the decode kernel serves a call with a cache. It reads the keys once per 16 rows (queries
// times heads of a KV head), and several thread blocks can share a row's keys; the forward kernel
// reads them once per 64 to 192 rows, of one thread block. num_splits as below.
bool decodes_cache(FwdParams const& params, int64_t num_splits, DeviceInfo const& device);

// Whether it writes that call's new rows as well, or they are written before.
bool decode_appends(FwdParams const& params, NewRows const& rows);

// Whether the decode kernel serves a dense call without a cache.
bool decodes_dense(FwdParams const& params, DeviceInfo const& device);

// Of a packed batch: what to put into params.seqlens.few_q. 0: the decode kernel serves none of it.
int few_queries(FwdParams const& params, int64_t num_splits, DeviceInfo const& device);

// num_splits as in flash_attn_with_kvcache: 0 chooses, 1 never cuts, n is a limit.
SplitSchedule decode_schedule(Variant const& variant, FwdParams const& params, int num_splits,
                              DeviceInfo const& device);

// Floats that the pieces of the schedule leave behind.
int64_t decode_workspace(Variant const& variant, FwdParams const& params,
                         SplitSchedule const& split);

// The call with its workspace put in place.
DecodeParams decode_params(Variant const& variant, FwdParams const& params,
                           SplitSchedule const& split, float* workspace, bool beside = false,
                           NewRows const& rows = {});

}  // namespace flash
