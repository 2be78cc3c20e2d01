// Counters in device memory that kernels leave at 0: one for each launch that may run at a time.
#pragma once

#include <cuda_runtime.h>

namespace flash {

// The number of a counter in [0, count) that no launch uses that could run beside this one, or -1
// if none is left. See docs/kernels.md, "Tile counters".
int tile_counter(cudaStream_t stream, int count);

}  // namespace flash
