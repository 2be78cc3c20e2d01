// The launches of one attention call. They are prepared with all that they need, and then made one
// after the other under the stream's lock, where nothing may be allocated.
#pragma once

#include <optional>
#include <utility>

#include "api/tensors.h"
#include "launch/stream_lock.h"
#include "launch/trace.h"

namespace flash::api {

// If p has odd rows, copies k and v into rows of whole chunks and sets p to read the copies,
// because the forward kernels need them. The copies have to be kept until the launch.
using KeyCopies = std::optional<std::pair<Tensor, Tensor>>;
KeyCopies copy_odd_rows(FwdParams& p, Tensor const& k, Tensor const& v, Tensor const& q);

// The forward kernel that serves the call, on the current device.
class ForwardLaunch {
 public:
  // q is the tensor in p.q. num_splits: see launch/forward_plan.h. of_cache: sequences may have
  // fewer keys than seqlen_k.
  ForwardLaunch(Tensor const& q, FwdParams const& p, int64_t num_splits, bool of_cache = false);

  void start(StreamLock const& lock) const;

 private:
  Variant const& variant_;
  FirstLaunch const first_;
  FwdParams params_;
  std::optional<Scratch> splits_;  // results of splits
};

// The decode kernel. num_splits, cached: see launch/forward_plan.h. beside, rows: DecodeParams'.
class DecodeLaunch {
 public:
  DecodeLaunch(Tensor const& q, FwdParams const& p, int64_t num_splits, bool cached,
               bool beside = false, NewRows const& rows = {});

  void start(StreamLock const& lock) const;

 private:
  Variant const& variant_;
  FirstLaunch const first_;
  plan::DecodePlan plan_;
  PieceSchedule schedule_;
  Scratch pieces_;
  DecodeParams params_;
};

}  // namespace flash::api
