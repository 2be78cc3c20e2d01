// NVIDIA H200: 132 SMs, 60 MiB of L2; numbers as `make tune` writes them.
#pragma once

#include "plan/machine.h"

namespace flash::plan {

// {fixed, step} of: tiles, KV-persistent, ordered dQ.
inline constexpr RowTimes kH200Backward[] = {
    {64, 64, {{7.698f, 2.019f}, {4.994f, 3.038f}, {6.083f, 2.312f}}},
    {96, 96, {{9.366f, 1.44f}, {1.918f, 3.364f}, {5.847f, 1.591f}}},
    {128, 128, {{9.227f, 1.855f}, {6.91f, 2.42f}, {7.26f, 2.135f}}},
    {192, 128, {{6.417f, 1.465f}, {0.01f, 2.83f}, {7.636f, 0.9552f}}},
    {192, 192, {{11.66f, 1.45f}, {3.233f, 2.333f}, {7.01f, 1.551f}}},
    {256, 256, {{9.609f, 2.012f}, {3.834f, 3.633f}, {0.5f, 2.611f}}},
    {512, 512, {{8.238f, 2.803f}, {2.652f, 4.634f}, {8.79f, 3.492f}}},
};

// {fixed, step} of: the row's tile, its second one, pack-GQA, pack-GQA with splits.
inline constexpr RowTimes kH200Forward[] = {
    {64, 64, {{2.94f, 1.459f}, {}, {3.0f, 1.463f}, {1.75f, 1.553f}}},
    {96, 96, {{2.51f, 1.452f}, {2.55f, 1.266f}, {1.88f, 1.512f}, {1.84f, 2.011f}}},
    {128, 128, {{1.76f, 1.516f}, {2.21f, 1.97f}, {2.04f, 1.535f}, {2.2f, 1.548f}}},
    {192, 128, {{2.32f, 1.844f}, {}, {2.2f, 1.9f}, {2.2f, 1.95f}}},
    {192, 192, {{1.68f, 1.734f}, {1.87f, 1.972f}, {2.32f, 1.627f}, {2.32f, 1.647f}}},
    {256, 256, {{2.44f, 1.781f}, {2.27f, 1.459f}, {2.32f, 1.803f}, {2.27f, 1.836f}}},
    {512, 512, {{8.713f, 1.519f}, {}, {}, {}}},
};

// {fixed, step} of: the same of codes.
inline constexpr RowTimes kH200ForwardCodes[] = {
    {64, 64, {{2.94f, 1.18f}, {}, {3.0f, 1.18f}, {1.75f, 1.25f}}},
    {128, 128, {{1.9f, 1.68f}, {}, {2.1f, 1.69f}, {2.2f, 1.72f}}},
    {256, 256, {{2.44f, 1.83f}, {}, {2.32f, 1.84f}, {2.27f, 1.87f}}},
};

// {fixed, step} of: the row's tile, its second one, where products are of codes.
inline constexpr RowTimes kH200ForwardFp8[] = {
    {64, 64, {{1.4f, 1.28f}, {1.4f, 1.78f}}},
    {96, 96, {{1.94f, 1.51f}, {1.97f, 1.8f}}},
    {128, 128, {{1.8f, 1.78f}, {}}},
    {192, 128, {{1.8f, 2.08f}, {}}},
    {192, 192, {{1.7f, 1.85f}, {2.2f, 2.14f}}},
    {256, 256, {{2.9f, 2.16f}, {}}},
};

// {fixed, step} of: pieces, of 16 bits and of codes.
inline constexpr RowTimes kH200Decode[] = {
    {64, 64, {{6.541f, 1.062f}, {7.222f, 0.968f}}},
    {128, 128, {{6.668f, 0.8542f}, {7.945f, 1.231f}}},
    {256, 256, {{6.39f, 0.9603f}, {8.2f, 1.128f}}},
    {512, 512, {{8.0f, 1.65f}, {}}},
    {64, 512, {{13.0f, 1.43f}, {}}},
};

inline constexpr Machine kH200 = {
    .sm = 90,
    .sm_count = 132,
    .l2_bytes = 60 << 20,
    .memory = 3.9e6f,
    .reads = 4.67e6f,
    .sm_reads = 7.498e4f,
    .code_reads = 4.434e4f,
    .launch = 7.0f,
    .l2_factor = 1.15f,
    .search = 0.9109f,
    .next_block = 1.387f,
    .cluster_block = 0.07706f,
    .merge_round = 1.8f,
    .merge_row = 0.8231f,
    .merge_wait = 1.45f,
    .mma_flops = 2.4e6f,
    .backward = kH200Backward,
    .forward = kH200Forward,
    .forward_codes = kH200ForwardCodes,
    .forward_fp8 = kH200ForwardFp8,
    .decode = kH200Decode,
};

}  // namespace flash::plan
