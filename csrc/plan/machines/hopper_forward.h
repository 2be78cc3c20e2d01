// Times of Hopper's forward kernels: a row's tile, its second one, pack-GQA, pack-GQA with splits.
#pragma once

#include "plan/machine.h"

namespace flash::plan {

inline constexpr ForwardTimes kHopperForward[] = {
    {64, 64, {2.94f, 1.459f}, {}, {3.00f, 1.463f}, {1.75f, 1.553f}},
    {96, 96, {2.51f, 1.452f}, {2.55f, 1.266f}, {1.88f, 1.512f}, {1.84f, 2.011f}},
    {128, 128, {1.76f, 1.516f}, {2.21f, 1.970f}, {2.04f, 1.535f}, {2.20f, 1.548f}},
    {192, 128, {2.32f, 1.844f}, {}, {2.20f, 1.900f}, {2.20f, 1.950f}},
    {192, 192, {1.68f, 1.734f}, {1.87f, 1.972f}, {2.32f, 1.627f}, {2.32f, 1.647f}},
    {256, 256, {2.44f, 1.781f}, {2.27f, 1.459f}, {2.32f, 1.803f}, {2.27f, 1.836f}},
};

}  // namespace flash::plan
