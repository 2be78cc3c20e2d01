// Stores a tile's rows of O.
#pragma once

#include "decode/output.h"

namespace flash::wide {

// Stores the rows that lie in shared memory, by all threads. scale_of: row -> its factor
template <class Config, class ScaleOf>
__device__ void store_out(decode::DecodeOutput<Config> const& output,
                          float const (&out)[Config::kBlockM][Config::kOutStride],
                          ScaleOf scale_of) {
  constexpr int kChunks = Config::kHeadDimV / 8;
  for (int i = threadIdx.x; i < output.work.tile.rows * kChunks; i += Config::kThreads) {
    int const r = i / kChunks, first = i % kChunks * 8;
    if (first < output.p.fwd.head_dim_v) {
      float const scale = scale_of(r);
      float values[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        values[e] = scale * out[r][first + e];
      }
      output.store(r, first, values);
    }
  }
}

}  // namespace flash::wide
