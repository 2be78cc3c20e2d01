#include "plan/cost.h"

#include <numeric>

namespace flash::plan {
namespace {

// Fills of a cache: all sequences are as long as the capacity, of any length up to it, or one is as
// long and the others are short.
struct Fill {
  double use;  // of the capacity, by all sequences but the longest, which uses all
  double weight;
};
constexpr Fill kFills[] = {{1, 0.25}, {0.5, 0.5}, {0.09, 0.25}};

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
  std::vector<Filled> fills;
  double const capacity = std::max(p.seqlen_k, 1), most = visible(p, capacity);
  for (auto const& [use, weight] : kFills) {
    // More sequences have all of the keys that a window shows.
    double const mean_use = use + (1 - use) / p.batch;
    double const mean = most * (1 - (1 - mean_use) * most / capacity);
    fills.push_back({p, weight});
    fills.back().problem.total_k = std::min(p.total_k, static_cast<int64_t>(mean * p.batch));
  }
  return fills;
}

KernelTimes const* times_of(std::span<RowTimes const> rows, int head_dim, int head_dim_v) {
  auto const row = std::ranges::find_if(rows, [&](RowTimes const& r) {
    return r.head_dim == head_dim && r.head_dim_v == head_dim_v;
  });
  return row == rows.end() ? nullptr : row->kernels;
}

Steps steps_of(Sides const& s, bool known) {
  bool const before = s.before >= 0 && s.before < s.other - 1;
  bool const after = s.after >= 0 && s.after < s.own - 1;
  double const rows = std::min<double>(s.tile, s.own), last = s.own - rows;  // of the last tile
  double const begin = s.other - s.own - s.before, end = s.other - s.own + s.after + rows;
  double const span = (after ? mean_limited(end, end + last, s.other) : s.other) -
                      (before ? mean_limited(begin, begin + last, s.other) : 0);
  double const most = before && after ? std::min(s.other, s.before + s.after + rows)
                      : after         ? std::clamp(end + last, 0., s.other)
                                      : s.other - (before ? std::clamp(begin, 0., s.other) : 0);
  // The part of a block, at an end of what is seen, that is not seen.
  double const unseen = !known            ? 0.5
                        : before || after ? 0.5 - 0.5 * std::gcd(s.tile, s.block) / s.block
                                          : divide_up(s.other, s.block) - s.other / s.block;
  double const mean = std::max(span, 0.) / s.block + unseen * (before && after ? 2 : 1);
  return {mean, std::max(most / s.block + unseen, mean)};
}

double queue_us(Queue const& q) {
  double const longest = std::max(q.longest, q.mean);
  double const waves = q.count / q.resident, before = (q.count - q.last) / q.resident;
  if (waves <= 1) {
    return longest;
  }
  // 1: the shortest takes next to nothing, 0: all take the same.
  double const unequal = std::clamp(2 * (longest - q.mean) / longest, 0., 1.);
  double const idle = (1 - unequal) * (std::ceil(waves - 1e-9) - waves);
  double const start = before < 1 ? 0 : (before - kEarly) * q.mean;
  return std::max((waves + idle) * q.mean, start + longest);
}

}  // namespace flash::plan
