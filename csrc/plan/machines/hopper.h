// Times of Hopper's backward kernels: an H100 and an H200 are the same processor with other memory.
#pragma once

#include "plan/machine.h"

namespace flash::plan {

inline constexpr BackwardTimes kHopperBackward[] = {
    {64, 64, {3.4f, 2.26f}, {3.6f, 2.55f}, {5.9f, 2.33f}},
    {96, 96, {1.7f, 1.72f}, {4.4f, 2.46f}, {4.6f, 1.81f}},
    {128, 128, {2.6f, 2.08f}, {3.4f, 2.48f}, {4.7f, 2.15f}},
    {192, 128, {0.7f, 1.66f}, {3.6f, 2.09f}, {3.7f, 1.70f}},
    {192, 192, {2.1f, 1.70f}, {3.9f, 1.86f}, {6.1f, 1.59f}},
    {256, 256, {3.9f, 2.10f}, {3.7f, 2.86f}, {10.2f, 2.19f}},
};

}  // namespace flash::plan
