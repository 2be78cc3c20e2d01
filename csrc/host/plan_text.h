// A plan in words: for the log, for flash_attn.explain and for measuring choices.
#pragma once

#include <string>

#include "plan/backward.h"

namespace flash {

// "ordered dQ, 2 of 8 heads a tile, 16 heads side by side"
std::string describe(plan::BackwardChoice const& choice, int group);

// JSON: {"choices": [{"text": …, "us": …}, …], "chosen": index}
std::string to_json(plan::Problem const& problem, plan::Machine const& machine,
                    plan::BackwardKernel const& kernel);

}  // namespace flash
