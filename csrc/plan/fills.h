// How full a cache may be, which only the device knows.
#pragma once

#include <cmath>
#include <vector>

#include "plan/problem.h"

namespace flash::plan {

// A problem with lengths that it may have, and how likely these are.
struct Filled {
  Problem problem;
  double weight;
};

// One problem, where the host knows all lengths.
std::vector<Filled> fills_of(Problem const& p);

// The keys of a tile that any of its rows sees.
double visible(Problem const& p, double keys);

// The geometric mean of us(i), the time of the i-th of these problems.
template <class Us>
double mean_us(std::vector<Filled> const& fills, Us us) {
  if (fills.size() == 1) {
    return us(0);
  }
  double log_us = 0;
  for (size_t i = 0; i < fills.size(); ++i) {
    log_us += fills[i].weight * std::log(us(i));
  }
  return std::exp(log_us);
}

}  // namespace flash::plan
