// Into how many parts a forward with few row blocks cuts their keys, and where these leave what
// they find.
#pragma once

#include "host/variant.h"

namespace flash {

// 1: none are cut. By the call and the GPU alone, never by the lengths, which only the device
// knows. num_splits: no more than that, if not 0.
int key_splits(FwdParams const& params, Variant const& variant, DeviceInfo const& device,
               int64_t num_splits);

// Floats of the parts' results.
int64_t key_splits_workspace(FwdParams const& params, int splits);

// params.splits, with that workspace.
KeySplits place_key_splits(FwdParams const& params, int splits, float* workspace);

}  // namespace flash
