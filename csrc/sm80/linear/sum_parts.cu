// Adds up the gradients that tiles of V leave.
#include <cutlass/numeric_types.h>

#include "launch/launch_kernel.h"
#include "linear/chunks.h"

namespace flash::sm80::linear {

using flash::linear::PartsParams;

constexpr int kPartsThreads = 256;

template <class Out>
__global__ void __launch_bounds__(kPartsThreads)
    parts_kernel(__grid_constant__ PartsParams const p) {
  int64_t const at = int64_t(blockIdx.x) * kPartsThreads + threadIdx.x;
  if (at >= p.numbers) {
    return;
  }
  if (p.sequences.cu) {
    flash::linear::CheckedOffsets const offset{p.sequences};
    int64_t const token = at / p.of_token;
    if (token < offset(0) || token >= offset(p.sequences.count)) {
      return;
    }
  }
  float sum = 0.f;
  for (int tile = 0; tile < p.tiles; ++tile) {
    sum += p.parts[tile * p.numbers + at];
  }
  static_cast<Out*>(p.out)[at] = Out(sum);
}

template <class Out>
void launch_parts(PartsParams const& p, LaunchContext const& launch) {
  int64_t const blocks = (p.numbers + kPartsThreads - 1) / kPartsThreads;
  launch_kernel<parts_kernel<Out>>(launch, {blocks, kPartsThreads, 0}, p);
}

void launch_parts_bf16(PartsParams const& p, LaunchContext const& launch) {
  launch_parts<cutlass::bfloat16_t>(p, launch);
}
void launch_parts_fp16(PartsParams const& p, LaunchContext const& launch) {
  launch_parts<cutlass::half_t>(p, launch);
}
void launch_parts_fp32(PartsParams const& p, LaunchContext const& launch) {
  launch_parts<float>(p, launch);
}

}  // namespace flash::sm80::linear
