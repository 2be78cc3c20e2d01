// Hopper's forward kernels: of a row's tile, of its second one, with pack-GQA, with splits.
#pragma once

#include "plan/machine.h"

namespace flash::plan {

inline constexpr ForwardTimes kHopperForward[] = {
    {64, 64, {2.79f, 1.396f}, {}, {1.04f, 1.457f}, {1.80f, 1.491f}},
    {96, 96, {2.63f, 1.353f}, {2.66f, 1.188f}, {1.82f, 1.501f}, {1.94f, 2.067f}},
    {128, 128, {1.56f, 1.490f}, {1.85f, 1.975f}, {1.85f, 1.537f}, {2.00f, 1.582f}},
    {192, 128, {2.05f, 1.830f}, {}, {2.20f, 1.900f}, {2.20f, 1.950f}},
    {192, 192, {1.73f, 1.640f}, {1.89f, 1.911f}, {2.18f, 1.585f}, {2.33f, 1.655f}},
    {256, 256, {2.09f, 1.762f}, {2.17f, 1.446f}, {2.29f, 1.786f}, {2.26f, 1.896f}},
};

}  // namespace flash::plan
