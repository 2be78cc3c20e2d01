// Counters in device memory that kernels leave at 0: some for each launch that may run at a time.
#pragma once

#include <cuda_runtime.h>

namespace flash {

// A number in [0, count), of a kernel's counter or range of counters, that no launch has that could
// run beside this one, or -1 if none is left. See docs/kernels/tile_counters.md.
int tile_counter(cudaStream_t stream, int count);

}  // namespace flash
