// NVIDIA H100 80GB HBM3: 132 SMs, 50 MiB of L2; numbers as `make tune` writes them.
#pragma once

#include "plan/machine.h"

namespace flash::plan {

// {fixed, step} of: tiles, KV-persistent, ordered dQ.
inline constexpr RowTimes kH100Backward[] = {
    {64, 64, {{7.64f, 2.003f}, {5.043f, 3.0f}, {5.794f, 2.291f}}},
    {96, 96, {{9.448f, 1.438f}, {1.75f, 3.313f}, {6.454f, 1.573f}}},
    {128, 128, {{9.845f, 1.825f}, {7.779f, 2.345f}, {6.479f, 2.185f}}},
    {192, 128, {{6.037f, 1.465f}, {0.01f, 2.876f}, {7.797f, 0.98f}}},
    {192, 192, {{8.725f, 1.462f}, {3.492f, 2.403f}, {7.273f, 1.515f}}},
    {256, 256, {{8.94f, 1.99f}, {4.14f, 3.702f}, {0.5f, 2.605f}}},
    {512, 512, {{8.238f, 2.803f}, {2.652f, 4.634f}, {8.79f, 3.492f}}},
};

// {fixed, step} of: the row's tile, its second one, pack-GQA, pack-GQA with splits.
inline constexpr RowTimes kH100Forward[] = {
    {64, 64, {{2.94f, 1.459f}, {}, {3.0f, 1.463f}, {1.75f, 1.553f}}},
    {96, 96, {{2.51f, 1.452f}, {2.55f, 1.266f}, {1.88f, 1.512f}, {1.84f, 2.011f}}},
    {128, 128, {{1.76f, 1.516f}, {2.21f, 1.97f}, {2.04f, 1.535f}, {2.2f, 1.548f}}},
    {192, 128, {{2.32f, 1.844f}, {}, {2.2f, 1.9f}, {2.2f, 1.95f}}},
    {192, 192, {{1.68f, 1.734f}, {1.87f, 1.972f}, {2.32f, 1.627f}, {2.32f, 1.647f}}},
    {256, 256, {{2.44f, 1.781f}, {2.27f, 1.459f}, {2.32f, 1.803f}, {2.27f, 1.836f}}},
    {512, 512, {{8.713f, 1.519f}, {}, {}, {}}},
};

// {fixed, step} of: the same of codes.
inline constexpr RowTimes kH100ForwardCodes[] = {
    {64, 64, {{2.94f, 1.18f}, {}, {3.0f, 1.18f}, {1.75f, 1.25f}}},
    {128, 128, {{1.9f, 1.68f}, {}, {2.1f, 1.69f}, {2.2f, 1.72f}}},
    {256, 256, {{2.44f, 1.83f}, {}, {2.32f, 1.84f}, {2.27f, 1.87f}}},
};

// {fixed, step} of: the row's tile, its second one, where products are of codes.
inline constexpr RowTimes kH100ForwardFp8[] = {
    {64, 64, {{1.4f, 1.28f}, {1.4f, 1.78f}}},
    {96, 96, {{1.94f, 1.51f}, {1.97f, 1.8f}}},
    {128, 128, {{1.8f, 1.78f}, {}}},
    {192, 128, {{1.8f, 2.08f}, {}}},
    {192, 192, {{1.7f, 1.85f}, {2.2f, 2.14f}}},
    {256, 256, {{2.9f, 2.16f}, {}}},
};

// {fixed, step} of: pieces, of 16 bits and of codes.
inline constexpr RowTimes kH100Decode[] = {
    {64, 64, {{7.097f, 0.8325f}, {7.8f, 0.9344f}}},
    {128, 128, {{6.491f, 0.7624f}, {8.41f, 1.05f}}},
    {256, 256, {{6.084f, 0.9731f}, {8.2f, 1.118f}}},
    {512, 512, {{8.0f, 1.65f}, {}}},
    {64, 512, {{13.0f, 1.43f}, {}}},
};

inline constexpr Machine kH100 = {
    .sm = 90,
    .sm_count = 132,
    .l2_bytes = 50 << 20,
    .memory = 2.8e6f,
    .reads = 3.15e6f,
    .sm_reads = 8.381e4f,
    .code_reads = 4.311e4f,
    .launch = 7.0f,
    .l2_factor = 1.2f,
    .search = 0.9399f,
    .next_block = 1.354f,
    .cluster_block = 0.07f,
    .merge_round = 1.84f,
    .merge_row = 0.7276f,
    .merge_wait = 1.15f,
    .mma_flops = 2.4e6f,
    .backward = kH100Backward,
    .forward = kH100Forward,
    .forward_codes = kH100ForwardCodes,
    .forward_fp8 = kH100ForwardFp8,
    .decode = kH100Decode,
};

}  // namespace flash::plan
