// Apart from the rest to be compiled with all optimisations: most of the time goes here.
#include "matrix.h"

#include <cutlass/float8.h>

namespace simt {

std::vector<float> to_float(std::vector<uint16_t> const& elements, Type type, bool odd) {
  std::vector<float> floats(elements.size());
  if (type == Type::kE4m3) {
    std::transform(elements.begin(), elements.end(), floats.begin(), [odd](uint16_t pair) {
      auto const code = static_cast<uint8_t>(odd ? pair >> 8 : pair & 0xff);
      return static_cast<float>(cutlass::float_e4m3_t::bitcast(code));
    });
  } else if (type == Type::kHalf) {
    std::transform(elements.begin(), elements.end(), floats.begin(), half_to_float);
  } else {
    std::transform(elements.begin(), elements.end(), floats.begin(), bfloat16_to_float);
  }
  return floats;
}

// The products of one instruction are added to each other before they join the accumulator, as in a
// tensor core: what is small beside an accumulator is not lost number by number.
[[gnu::target_clones("avx512f", "avx2", "default")]] void multiply_add(float* c, float const* a,
                                                            float const* b, int n) {
  constexpr int kWidest = 256;
  for (int m = 0; m < 64; ++m) {
    float sum[kWidest] = {};
    for (int k = 0; k < kDepth; ++k) {
      float const factor = a[k * 64 + m];
      for (int j = 0; j < n; ++j) {
        sum[j] += factor * b[k * n + j];
      }
    }
    for (int j = 0; j < n; ++j) {
      c[m * n + j] += sum[j];
    }
  }
}

}  // namespace simt
