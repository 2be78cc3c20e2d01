// Apart from the rest to be compiled with all optimisations: most of the time goes here.
#include "matrix.h"

#include <cutlass/numeric_types.h>

namespace simt {

namespace {

template <class Element>
std::vector<float> table() {
  std::vector<float> values(1 << 16);
  for (int bits = 0; bits < 1 << 16; ++bits) {
    values[bits] = static_cast<float>(Element::bitcast(static_cast<uint16_t>(bits)));
  }
  return values;
}

}  // namespace

std::vector<float> to_float(std::vector<uint16_t> const& elements, Type type) {
  static std::vector<float> const half = table<cutlass::half_t>();
  static std::vector<float> const bfloat16 = table<cutlass::bfloat16_t>();
  float const* const values = type == Type::kHalf ? half.data() : bfloat16.data();
  std::vector<float> floats(elements.size());
  std::transform(elements.begin(), elements.end(), floats.begin(),
                 [=](uint16_t bits) { return values[bits]; });
  return floats;
}

// The products of one instruction are added to each other before they join the accumulator, as in a
// tensor core: what is small beside an accumulator is not lost number by number.
void multiply_add(float* c, float const* a, float const* b, int n) {
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
