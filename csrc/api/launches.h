// The launches of one call of attention: prepared with all that they need, and then made one behind
// the other under the stream's lock, where nothing may be allocated any more.
#pragma once

#include <optional>
#include <utility>

#include "api/tensors.h"
#include "host/stream_lock.h"
#include "host/variant.h"
#include "params/decode_params.h"

namespace flash::api {

// If p has odd rows: copies of k and v, of whole chunks, which it then reads instead. For the
// forward kernels; to be kept until they are launched.
using KeyCopies = std::optional<std::pair<Tensor, Tensor>>;
KeyCopies copy_odd_rows(FwdParams& p, Tensor const& k, Tensor const& v, Tensor const& q);

// The forward kernel that serves the call, on the current device.
class ForwardLaunch {
 public:
  // q is the tensor in p.q. num_splits: see host/attention_plan.h. of_cache: lengths of keys are
  // less than they may be.
  ForwardLaunch(Tensor const& q, FwdParams const& p, int64_t num_splits, bool of_cache = false);

  void start(StreamLock const& lock) const;

 private:
  Variant const& variant_;
  FwdParams params_;
  std::optional<Scratch> splits_;  // results of splits
};

// The decode kernel. num_splits, cached: see host/decode_plan.h. beside, rows: as of DecodeParams.
class DecodeLaunch {
 public:
  DecodeLaunch(Tensor const& q, FwdParams const& p, int64_t num_splits, bool cached,
               bool beside = false, NewRows const& rows = {});

  // Whether there is one for such a call.
  static bool serves(Tensor const& q, FwdParams const& p);

  void start(StreamLock const& lock) const;

 private:
  Variant const& variant_;
  SplitSchedule split_;
  Scratch pieces_;
  DecodeParams params_;
};

}  // namespace flash::api
