// A plan as text: for the log, for flash_attn.explain and for measuring choices.
#pragma once

#include <string>

#include "plan/plan.h"

namespace flash {

// "tiles, 2 of 8 heads a tile, 16 side by side"
std::string describe(plan::BackwardChoice const& choice, int group);

// "128 rows x 176 keys, 16 heads side by side"
std::string describe(plan::ForwardChoice const& choice, plan::Kernel const& kernel);

// "24 pieces" that a tile of each sequence has together
std::string describe(plan::PieceCut const& cut);

// JSON: {"choices": [{"text": …, "us": …}, …], "chosen": index, "text": …, "us": …}
std::string backward_json(plan::Problem const& problem, plan::Machine const& machine,
                          plan::Kernel const& kernel);
std::string forward_json(plan::Problem const& problem, plan::Machine const& machine,
                         plan::Kernel const& kernel);
// chosen: -1 if the forward kernel serves the call.
std::string decode_json(std::vector<plan::DecodeChoice> const& all, plan::DecodePlan const& plan);

}  // namespace flash
