// What the predictions of all directions have in common (docs/plan.md).
#pragma once

#include <algorithm>
#include <cmath>

#include "core/tile_numbers.h"
#include "plan/plan.h"

namespace flash::plan {

constexpr double kElement = 2, kSum = 4;  // bytes of a number in Q and the like, and in fp32

// A problem with lengths that it may have, which only the device knows, and how likely these are.
struct Filled {
  Problem problem;
  double weight;
};

// One problem, where the host knows all lengths.
std::vector<Filled> fills_of(Problem const& p);

// How many of `keys` some row of the sequence sees.
double visible(Problem const& p, double keys);

// Each candidate, but for one that repeats the last, with the geometric mean of its times over the
// fills, which are Cost{problem, machine, kernel, candidate}.us().
template <class Cost, class Choice>
std::vector<Predicted<Choice>> predicted(std::vector<Choice> const& candidates,
                                         std::vector<Filled> const& fills, Machine const& m,
                                         Kernel const& k) {
  std::vector<Predicted<Choice>> choices;
  for (Choice const& candidate : candidates) {
    if (!choices.empty() && choices.back().choice == candidate) {
      continue;
    }
    double log_us = 0;
    for (auto const& [problem, weight] : fills) {
      log_us += weight * std::log(Cost{problem, m, k, candidate}.us());
    }
    choices.push_back({candidate, std::exp(log_us)});
  }
  return choices;
}

// The choice of the least time. The simpler ones come first; another wins if it takes less than
// this share of their time.
constexpr double kSimpler = 0.99;

template <class Choice>
Predicted<Choice> best_of(std::vector<Predicted<Choice>> const& choices) {
  Predicted<Choice> best = choices.front();
  for (Predicted<Choice> const& other : choices) {
    best = other.us < kSimpler * best.us ? other : best;
  }
  return best;
}

// The times of a row's kernels, by index, or others if they were not measured.
KernelTimes times_of(std::span<RowTimes const> rows, Kernel const& k, int kernel,
                     KernelTimes others);

// The step of a kernel that was not measured, in µs: its products. CTAs of an SM share
// its tensor cores.
inline float counted_step(Machine const& m, Kernel const& k, double flops) {
  return static_cast<float>(flops * k.resident / m.sm_count / m.mma_flops);
}

inline double divide_up(double n, double d) { return std::ceil(n / d); }

// Two times that overlap take a little longer than the longer of them.
// std::hypot would need glibc 2.35; the wheel runs with 2.34.
inline double overlapped(double a, double b) {
  double const a2 = a * a, b2 = b * b;
  return std::sqrt(std::sqrt(a2 * a2 + b2 * b2));
}

// The share of repeated accesses to so many bytes that L2 misses.
inline double missed(Machine const& m, double bytes) {
  double const full = bytes / (double(m.l2_factor) * double(m.l2_bytes)), square = full * full;
  return square / (1 + square);
}

// Blocks that a tile sees.
struct Steps {
  double mean;
  double longest;
};

// Steps of a tile of `tile` rows, queries or keys, through blocks of `block` rows of the other
// side. own, other: lengths of both sides. before, after: how far a row sees, with the sides' ends
// aligned; negative: no limit. known: `own` and `other` are exact; otherwise they are means, and
// the last block is half full.
Steps steps_of(int tile, int block, double own, double other, int before, int after, bool known);

// The time of tiles that free CTAs draw one after the other, `resident` at a time. mean, longest:
// µs of a tile. last: tiles of the last round of heads, whose longest is drawn first.
double queue_us(double count, double resident, double mean, double longest, double last);

// As many heads side by side as are wanted, or a few less, so that rounds of them are alike.
inline int even_width(double wanted, double heads) {
  double const all = std::clamp(heads, 1., 1e9);
  return even_group(static_cast<int>(std::clamp(wanted, 1., all)), static_cast<int64_t>(all));
}

// Heads in the last round, if side_by_side of `heads` run at a time.
inline double last_round(double heads, double side_by_side) {
  return heads - (std::ceil(heads / side_by_side) - 1) * side_by_side;
}

}  // namespace flash::plan
