// NVIDIA H100 80GB HBM3: 132 multiprocessors, 50 MiB of L2; numbers as `make tune` writes them.
#pragma once

#include "plan/machine.h"

namespace flash::plan {

// {begin, step} of: tiles, KV-persistent, ordered dQ.
inline constexpr BackwardTimes kH100Backward[] = {
    {64, 64, {8.1f, 2.046f}, {6.89f, 3.124f}, {4.0f, 2.25f}},
    {96, 96, {12.36f, 1.392f}, {2.0f, 2.986f}, {6.28f, 1.406f}},
    {128, 128, {11.5f, 1.87f}, {8.27f, 2.407f}, {5.67f, 1.959f}},
    {192, 128, {5.7f, 1.384f}, {0.01f, 2.724f}, {8.49f, 0.984f}},
    {192, 192, {9.47f, 1.477f}, {3.75f, 2.335f}, {7.36f, 1.483f}},
    {256, 256, {10.59f, 1.933f}, {4.34f, 4.173f}, {0.5f, 2.3f}},
};

// {begin, step} of: the row's tile, its second one, pack-GQA, pack-GQA with splits.
inline constexpr ForwardTimes kH100Forward[] = {
    {64, 64, {2.94f, 1.459f}, {}, {3.0f, 1.463f}, {1.75f, 1.553f}},
    {96, 96, {2.51f, 1.452f}, {2.55f, 1.266f}, {1.88f, 1.512f}, {1.84f, 2.011f}},
    {128, 128, {1.76f, 1.516f}, {2.21f, 1.97f}, {2.04f, 1.535f}, {2.2f, 1.548f}},
    {192, 128, {2.32f, 1.844f}, {}, {2.2f, 1.9f}, {2.2f, 1.95f}},
    {192, 192, {1.68f, 1.734f}, {1.87f, 1.972f}, {2.32f, 1.627f}, {2.32f, 1.647f}},
    {256, 256, {2.44f, 1.781f}, {2.27f, 1.459f}, {2.32f, 1.803f}, {2.27f, 1.836f}},
};

// {begin, step} of: pieces.
inline constexpr DecodeTimes kH100Decode[] = {
    {64, 64, {3.9f, 0.78f}},
    {128, 128, {4.6f, 0.62f}},
    {256, 256, {6.4f, 0.99f}},
};

inline constexpr Machine kH100 = {
    .sm = 90,
    .sm_count = 132,
    .l2_bytes = 50 << 20,
    .smem_per_block = 232448,
    .memory = 2.8e6f,
    .reads = 3.15e6f,
    .sm_reads = 5.7e4f,
    .l2_gain = 1.9f,
    .launch = 7.0f,
    .l2_share = 1.2f,
    .mma_flops = 2.4e6f,
    .backward = kH100Backward,
    .forward = kH100Forward,
    .decode = kH100Decode,
};

}  // namespace flash::plan
