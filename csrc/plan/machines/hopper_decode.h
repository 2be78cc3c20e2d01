// Times of Hopper's decode kernels, which are the sm80 ones.
#pragma once

#include "plan/machine.h"

namespace flash::plan {

inline constexpr DecodeTimes kHopperDecode[] = {
    {64, 64, {3.9f, 0.78f}},
    {128, 128, {4.6f, 0.62f}},
    {256, 256, {6.4f, 0.99f}},
};

}  // namespace flash::plan
