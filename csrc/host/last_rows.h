// A forward whose row blocks take equal time, as they do without a mask, and leave places empty in
// their last round: which rows of it are cut along the keys instead. They are a call of their own,
// that starts while the others' ends: rows do not know of each other.
#pragma once

#include "core/last_rows.h"
#include "host/variant.h"

namespace flash {

// By the call and the GPU alone. None where a caller or host/key_splits.h has decided on parts.
LastRows last_rows(FwdParams const& params, Variant const& variant, DeviceInfo const& device);

// The same call of rows [begin, end) of each sequence: of a dense one in which all rows see the
// same keys.
FwdParams with_rows(FwdParams params, int begin, int end);

}  // namespace flash
