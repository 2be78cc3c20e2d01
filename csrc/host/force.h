// For whoever measures what each choice of a plan takes (`python -m benchmarks regret`).
#pragma once

#include <string>

namespace flash {

inline int forced_choice = -1;  // of the list of a call's choices; -1: the one that is planned
inline bool records_plans = false;
inline std::string recorded_plan;  // of the last call, as JSON (host/plan_text.h)

}  // namespace flash
