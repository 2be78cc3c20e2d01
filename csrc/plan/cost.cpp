#include "plan/cost.h"

#include <numeric>

namespace flash::plan {
namespace {

// The first CTA runs out of work this part of an average tile before all others.
constexpr double kEarly = 0.5;

// The mean of x, clamped to [0, most], over x in [from, to].
double mean_limited(double from, double to, double most) {
  auto const area = [&](double x) {
    double const inside = std::clamp(x, 0., most);
    return inside * inside / 2 + most * std::max(x - most, 0.);
  };
  return to > from ? (area(to) - area(from)) / (to - from) : std::clamp(from, 0., most);
}

}  // namespace

double visible(Problem const& p, double keys) {
  return p.mask.left < 0 ? keys : std::min(keys, double(p.mask.left) + p.seqlen_q);
}

std::vector<Filled> fills_of(Problem const& p) {
  if (p.batch == 0 || !(p.used_k || p.page_size > 0)) {
    return {{p, 1}};
  }
  double const capacity = std::max(p.seqlen_k, 1), most = visible(p, capacity);
  // use: the part of the capacity that all sequences but the longest use, which uses all.
  auto const filled = [&](double use, double weight) {
    double const mean_use = use + (1 - use) / p.batch;
    // More sequences have all of the keys that a window shows.
    double const mean = most * (1 - (1 - mean_use) * most / capacity);
    Filled fill{p, weight};
    fill.problem.total_k = std::min(p.total_k, static_cast<int64_t>(mean * p.batch));
    return fill;
  };
  // All sequences are as long as the capacity, of any length up to it, or one is as long and the
  // others are short.
  return {filled(1, 0.25), filled(0.5, 0.5), filled(0.09, 0.25)};
}

KernelTimes times_of(std::span<RowTimes const> rows, Kernel const& k, int kernel,
                     KernelTimes others) {
  auto const row = std::ranges::find_if(rows, [&](RowTimes const& r) {
    return r.head_dim == k.head_dim && r.head_dim_v == k.head_dim_v;
  });
  return row == rows.end() ? others : row->kernels[kernel];
}

Steps steps_of(int tile, int block, double own, double other, int before, int after, bool known) {
  bool const left = before >= 0 && before < other - 1, right = after >= 0 && after < own - 1;
  double const rows = std::min<double>(tile, own), last = own - rows;  // of the last tile
  double const begin = other - own - before, end = other - own + after + rows;
  double const span = (right ? mean_limited(end, end + last, other) : other) -
                      (left ? mean_limited(begin, begin + last, other) : 0);
  double const most = left && right ? std::min(other, before + after + rows)
                      : right       ? std::clamp(end + last, 0., other)
                                    : other - (left ? std::clamp(begin, 0., other) : 0);
  // The part of a block, at an end of what is seen, that is not seen.
  double const unseen = !known          ? 0.5
                        : left || right ? 0.5 - 0.5 * std::gcd(tile, block) / block
                                        : divide_up(other, block) - other / block;
  double const mean = std::max(span, 0.) / block + unseen * (left && right ? 2 : 1);
  return {mean, std::max(most / block + unseen, mean)};
}

double queue_us(double count, double resident, double mean, double longest, double last) {
  longest = std::max(longest, mean);
  double const waves = count / resident, before = (count - last) / resident;
  if (waves <= 1) {
    return longest;
  }
  // 1: the shortest takes next to nothing, 0: all take the same.
  double const unequal = std::clamp(2 * (longest - mean) / longest, 0., 1.);
  double const idle = (1 - unequal) * (std::ceil(waves - 1e-9) - waves);
  double const start = before < 1 ? 0 : (before - kEarly) * mean;
  return std::max((waves + idle) * mean, start + longest);
}

}  // namespace flash::plan
