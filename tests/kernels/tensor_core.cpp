// Apart from the rest to be compiled once, and with all optimisations: half of the time that the
// kernels of sm_80 take goes here.
#include "tensor_core.h"

namespace simt {

namespace {

constexpr int kRows = 16, kColumns = 8, kDepth = 16;

// What a lane brings, and what all of them leave in its place.
struct Shown {
  uint32_t a[4];
  uint32_t b[2];
  float c[4];  // then D
  uint32_t is_product;
};
static_assert(sizeof(Shown) <= Warp::kBytes);

// Element i of C in a lane's fragment.
int row_of(int lane, int i) { return lane / 4 + i / 2 * 8; }
int column_of(int lane, int i) { return lane % 4 * 2 + i % 2; }

// Rounded once an instruction, about as a tensor core does. Eight sums at a time: one waits for
// itself only.
[[gnu::target_clones("avx512f", "avx2", "default")]] void multiply_add(double (&sum)[kRows][kColumns],
                                                            double const (&a)[kRows][kDepth],
                                                            double const (&b)[kDepth][kColumns]) {
  for (int row = 0; row < kRows; ++row) {
    double of_row[kColumns];
    std::copy_n(sum[row], kColumns, of_row);
    for (int k = 0; k < kDepth; ++k) {
      for (int column = 0; column < kColumns; ++column) {
        of_row[column] += a[row][k] * b[k][column];
      }
    }
    std::copy_n(of_row, kColumns, sum[row]);
  }
}

// All lanes' D, from all lanes' fragments.
template <class ToFloat>
void multiply(ToFloat value_of, Shown* const (&lanes)[kWarp]) {
  double a[kRows][kDepth], b[kDepth][kColumns], sum[kRows][kColumns];
  for (int lane = 0; lane < kWarp; ++lane) {
    Shown const& own = *lanes[lane];
    int const group = lane / 4, pair = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      int const shift = 16 * half;
      for (int word = 0; word < 4; ++word) {
        a[group + word % 2 * 8][pair + word / 2 * 8 + half] =
            value_of(static_cast<uint16_t>(own.a[word] >> shift));
      }
      for (int word = 0; word < 2; ++word) {
        b[pair + word * 8 + half][group] = value_of(static_cast<uint16_t>(own.b[word] >> shift));
      }
    }
    for (int i = 0; i < 4; ++i) {
      sum[row_of(lane, i)][column_of(lane, i)] = own.c[i];
    }
  }
  multiply_add(sum, a, b);
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < 4; ++i) {
      lanes[lane]->c[i] = static_cast<float>(sum[row_of(lane, i)][column_of(lane, i)]);
    }
    lanes[lane]->is_product = true;
  }
}

}  // namespace

// The first lane that goes on multiplies for all of them.
void mma_16x8x16(Type type, float* const (&d)[4], uint32_t const (&a)[4], uint32_t const (&b)[2],
                 float const (&c)[4]) {
  auto& shown = warp().shown[warp().barrier.generation % 2];
  auto const at = [&](int lane) { return reinterpret_cast<Shown*>(shown[lane]); };
  Shown& mine = *at(lane());
  mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}, false};
  wait(warp().barrier);
  if (!mine.is_product) {
    Shown* lanes[kWarp];
    for (int lane = 0; lane < kWarp; ++lane) {
      lanes[lane] = at(lane);
    }
    if (type == Type::kHalf) {
      multiply(half_to_float, lanes);
    } else {
      multiply(bfloat16_to_float, lanes);
    }
  }
  for (int i = 0; i < 4; ++i) {
    *d[i] = mine.c[i];
  }
}

}  // namespace simt
