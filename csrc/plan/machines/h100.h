// NVIDIA H100 80GB HBM3: 132 multiprocessors, 50 MiB of L2; numbers as `make tune` writes them.
#pragma once

#include "plan/machine.h"

namespace flash::plan {

// {begin, step} of: tiles, KV-persistent, ordered dQ.
inline constexpr RowTimes kH100Backward[] = {
    {64, 64, {{8.487f, 2.007f}, {7.025f, 3.102f}, {8.072f, 2.256f}}},
    {96, 96, {{11.71f, 1.392f}, {2.02f, 3.326f}, {6.159f, 1.523f}}},
    {128, 128, {{12.58f, 1.794f}, {7.279f, 2.33f}, {5.726f, 2.182f}}},
    {192, 128, {{5.661f, 1.452f}, {0.01f, 2.95f}, {8.044f, 0.9526f}}},
    {192, 192, {{9.027f, 1.449f}, {3.795f, 2.412f}, {7.152f, 1.501f}}},
    {256, 256, {{9.778f, 2.015f}, {4.34f, 3.592f}, {0.5f, 2.49f}}},
};

// {begin, step} of: the row's tile, its second one, pack-GQA, pack-GQA with splits.
inline constexpr RowTimes kH100Forward[] = {
    {64, 64, {{2.94f, 1.459f}, {}, {3.0f, 1.463f}, {1.75f, 1.553f}}},
    {96, 96, {{2.51f, 1.452f}, {2.55f, 1.266f}, {1.88f, 1.512f}, {1.84f, 2.011f}}},
    {128, 128, {{1.76f, 1.516f}, {2.21f, 1.97f}, {2.04f, 1.535f}, {2.2f, 1.548f}}},
    {192, 128, {{2.32f, 1.844f}, {}, {2.2f, 1.9f}, {2.2f, 1.95f}}},
    {192, 192, {{1.68f, 1.734f}, {1.87f, 1.972f}, {2.32f, 1.627f}, {2.32f, 1.647f}}},
    {256, 256, {{2.44f, 1.781f}, {2.27f, 1.459f}, {2.32f, 1.803f}, {2.27f, 1.836f}}},
};

// {begin, step} of: pieces.
inline constexpr RowTimes kH100Decode[] = {
    {64, 64, {{3.9f, 0.78f}}},
    {128, 128, {{4.6f, 0.62f}}},
    {256, 256, {{6.4f, 0.99f}}},
};

inline constexpr Machine kH100 = {
    .sm = 90,
    .sm_count = 132,
    .l2_bytes = 50 << 20,
    .memory = 2.8e6f,
    .reads = 3.15e6f,
    .sm_reads = 5.7e4f,
    .l2_gain = 1.9f,
    .launch = 7.0f,
    .l2_share = 1.2f,
    .search = 1.7f,
    .cluster_block = 0.07f,
    .merge_round = 1.6f,
    .merge_row = 0.48f,
    .merge_wait = 0.75f,
    .mma_flops = 2.4e6f,
    .backward = kH100Backward,
    .forward = kH100Forward,
    .decode = kH100Decode,
};

}  // namespace flash::plan
