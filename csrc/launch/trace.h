// One line of text for each launch, while there is a listener: FLASH_ATTN_LOG=1 makes Python one.
#pragma once

#include <string>

#include "launch/variant.h"
#include "plan/backward.h"
#include "plan/forward.h"

namespace flash {

using TraceListener = void (*)(std::string const& line);

// Sets the listener of the whole process. Null: there is none, and a launch only checks that.
void trace_to(TraceListener listener);

// The listener may wait for Python's interpreter, so a caller must not hold a lock that a thread
// which has the interpreter may wait for.
void trace_launch(FwdParams const& params, Variant const& variant, plan::ForwardPlan const& plan);
void trace_launch(FwdParams const& params, Variant const& variant);  // of decode
void trace_launch(BwdParams const& params, Variant const& variant, plan::BackwardPlan const& plan);

}  // namespace flash
