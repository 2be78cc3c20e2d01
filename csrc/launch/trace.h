// One line of text for each launch, while there is a listener: FLASH_ATTN_LOG=1 makes Python one.
#pragma once

#include <chrono>
#include <string>

#include "launch/variant.h"
#include "plan/plan.h"

namespace flash {

using TraceListener = void (*)(std::string const& line);

// Sets the listener of the whole process. Null: there is none, and a launch only checks that.
void trace_to(TraceListener listener);

// The listener may wait for Python's interpreter, so a caller must not hold a lock that a thread
// which has the interpreter may wait for.
void trace_launch(FwdParams const& params, Variant const& variant, plan::ForwardPlan const& plan);
void trace_launch(FwdParams const& params, Variant const& variant, plan::DecodePlan const& plan);
void trace_launch(FwdParams const& params, Variant const& variant);  // of new rows to a cache
void trace_launch(BwdParams const& params, Variant const& variant, plan::BackwardPlan const& plan);

// Lives while a call prepares its launch and makes it. If that is the first launch of a row on a
// GPU, when CUDA loads its kernels or compiles them, the listener is told how long it took. It
// encloses the stream's lock, which a listener must not find taken.
class FirstLaunch {
 public:
  FirstLaunch(Variant const& variant, DeviceInfo const& device);
  ~FirstLaunch();
  FirstLaunch(FirstLaunch const&) = delete;
  FirstLaunch& operator=(FirstLaunch const&) = delete;

 private:
  Variant const* variant_;  // null: there is nothing to tell
  int sm_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace flash
