// One line for each launch, while somebody listens: FLASH_ATTN_LOG=1 has Python do it.
#pragma once

#include <string>

#include "host/variant.h"
#include "plan/backward.h"
#include "plan/forward.h"

namespace flash {

using TraceListener = void (*)(std::string const& line);

// From now on, for the whole process; null: nobody listens, and a launch asks no more than that.
void trace_to(TraceListener listener);

// The listener may wait for Python's interpreter: hold nothing that a thread which has the
// interpreter may wait for.
void trace_launch(FwdParams const& params, Variant const& variant, plan::ForwardPlan const& plan);
void trace_launch(FwdParams const& params, Variant const& variant);  // of decode
void trace_launch(BwdParams const& params, Variant const& variant, plan::BackwardPlan const& plan);

}  // namespace flash
