// What the predictions of all directions have in common (docs/plan.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "plan/machine.h"
#include "plan/problem.h"

namespace flash::plan {

constexpr double kElement = 2, kSum = 4;  // bytes of a number in Q and the like, and in fp32

// A way to serve a call, and the time that is predicted for it.
template <class Choice>
struct Predicted {
  Choice choice;
  double us;
};

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

// The times of a row's kernels, or null: they were not measured.
KernelTimes const* times_of(std::span<RowTimes const> rows, int head_dim, int head_dim_v);

inline double divide_up(double n, double d) { return std::ceil(n / d); }

// Two times that overlap take a little longer than the longer of them.
inline double overlapped(double a, double b) {
  double const a2 = a * a, b2 = b * b;
  return std::sqrt(std::sqrt(a2 * a2 + b2 * b2));
}

// The share of repeated accesses to so many bytes that L2 misses.
inline double missed(Machine const& m, double bytes) {
  double const full = bytes / (double(m.l2_share) * double(m.l2_bytes)), square = full * full;
  return square / (1 + square);
}

// Tiles of one side, queries or keys, that go through blocks of the other side. A mask lets a row
// see so far before and after itself, where both sides' ends are aligned.
struct Sides {
  int tile;
  int block;
  double own;    // rows of the tiles' side
  double other;  // rows of the other one
  int before;
  int after;
};

// Blocks that a tile sees.
struct Steps {
  double mean;
  double longest;
};

// known: the sequence has this length; otherwise it's an average, and ends anywhere in a block.
Steps steps_of(Sides const& s, bool known);

// Tiles that free CTAs draw one after the other.
struct Queue {
  double count;
  double resident;  // CTAs
  double mean;      // µs of a tile
  double longest;   // µs
  double last;      // so many tiles come with the last group, whose longest begin first
};

double queue_us(Queue const& q);

// Of so many heads, those in the last group of heads that are side by side.
inline double last_group(double heads, double side_by_side) {
  return heads - (std::ceil(heads / side_by_side) - 1) * side_by_side;
}

}  // namespace flash::plan
