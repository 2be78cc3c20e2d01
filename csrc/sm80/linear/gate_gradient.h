// A gate's gradient: the sum of all that crosses its token. What it adds belongs to the sum, so
// that nothing cancels: pairs of a later query and an earlier key, W = A ∘ dP; queries from the
// token on that read S0; keys before it that reach S'; and S0 itself, which reaches S'.
#pragma once

#include "sm80/linear/accumulator_rows.h"
#include "sm80/linear/gradients_config.h"

namespace flash::sm80::linear {

// Column sums of a square of W below the diagonal.
__device__ inline void store_columns(float const (&left)[4], float const (&right)[4], float* out) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float const near = sum_of_column(left[i] + left[2 + i]);
    float const far = sum_of_column(right[i] + right[2 + i]);
    if (lane < 4) {
      out[lane * 2 + i] = near;
      out[8 + lane * 2 + i] = far;
    }
  }
}

// The sums over a row's columns before each of the lane's two, in each run of eight.
struct Before {
  float near[2];
  float far[2];
};

__device__ inline Before sums_before(float near0, float near1, float far0, float far1) {
  int const lane = threadIdx.x % 32, of_row = lane % 4;
  float near = near0 + near1, far = far0 + far1;
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    float const left = __shfl_up_sync(0xffffffffu, near, distance);
    float const right = __shfl_up_sync(0xffffffffu, far, distance);
    near += of_row >= distance ? left : 0.f;
    far += of_row >= distance ? right : 0.f;
  }
  float const all_near = __shfl_sync(0xffffffffu, near, lane | 3);
  near = __shfl_up_sync(0xffffffffu, near, 1);
  far = __shfl_up_sync(0xffffffffu, far, 1);
  near = of_row == 0 ? 0.f : near;
  far = all_near + (of_row == 0 ? 0.f : far);
  return {{near, near + near0}, {far, far + far0}};
}

// Stores the sum over W's pairs inside the strip, i >= token > j, for each token of the strip.
__device__ inline void store_own(float const (&left)[4], float const (&right)[4], float* out) {
  int const lane = threadIdx.x % 32;
  float near[2] = {}, far[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = lane / 4 + half * 8;
    Before const before =
        sums_before(left[2 * half], left[2 * half + 1], right[2 * half], right[2 * half + 1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const token = lane % 4 * 2 + i;
      near[i] += row >= token ? before.near[i] : 0.f;
      far[i] += row >= token + 8 ? before.far[i] : 0.f;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float const sum = sum_of_column(near[i]), next = sum_of_column(far[i]);
    if (lane < 4) {
      out[lane * 2 + i] = sum;
      out[8 + lane * 2 + i] = next;
    }
  }
}

// Sums that many tokens' gates share. strips: how many the chunk has.
template <class C>
__device__ void sum_strips(GateSums<C>& sums, int strips) {
  static_assert(C::kChunk + C::kOffDiagonal + C::kStrips < C::kThreads);
  int const token = threadIdx.x, square = token - C::kChunk, strip = square - C::kOffDiagonal;
  if (token < C::kChunk) {
    float after = 0.f;
    for (int later = token / 16 + 1; later < strips; ++later) {
      after += sums.columns[pair_number(later, token / 16)][token % 16];
    }
    sums.after[token] = after;
  } else if (square < C::kOffDiagonal) {
    float all = 0.f;
    for (float const& column : sums.columns[square]) {
      all += column;
    }
    sums.squares[square] = all;
  } else if (strip < C::kStrips) {
    float read = 0.f, reached = 0.f;
    for (int i = strip * 16; i < strip * 16 + 16; ++i) {
      read += sums.read[i];
      reached += sums.reached[i];
    }
    sums.read_of[strip] = read;
    sums.reached_of[strip] = reached;
  } else if (strip == C::kStrips) {
    float all = 0.f;
    for (float const& kept : sums.kept) {
      all += kept;
    }
    sums.kept_of_all = all;
  }
}

// What crosses a token's gate, after sum_strips. total: the decay of S0.
template <class C>
__device__ float crossing(GateSums<C> const& sums, int token, int strips, float total) {
  int const strip = token / 16, begin = strip * 16;
  float sum = sums.kept_of_all * total + sums.own[token];
  for (int i = token; i < begin + 16; ++i) {
    sum += sums.read[i] + sums.rows[i];
  }
  for (int j = begin; j < token; ++j) {
    sum += sums.reached[j] + sums.after[j];
  }
  for (int earlier = 0; earlier < strip; ++earlier) {
    sum += sums.reached_of[earlier];
  }
  for (int later = strip + 1; later < strips; ++later) {
    sum += sums.read_of[later];
    for (int earlier = 0; earlier < strip; ++earlier) {
      sum += sums.squares[pair_number(later, earlier)];
    }
  }
  return sum;
}

}  // namespace flash::sm80::linear
