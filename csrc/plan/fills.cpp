#include "plan/fills.h"

namespace flash::plan {
namespace {

// All sequences are as long as the capacity, of any length up to it, or one is as long and the
// others are short.
struct Fill {
  double use;  // of the capacity, by all sequences but the longest, which uses all
  double weight;
};
constexpr Fill kFills[] = {{1, 0.25}, {0.5, 0.5}, {0.09, 0.25}};

int64_t used_keys(Problem const& p, double use) {
  double const mean_use = use + (1 - use) / p.batch, capacity = std::max(p.seqlen_k, 1);
  // More sequences have all of the keys that a window shows.
  double const most = visible(p, capacity), mean = most * (1 - (1 - mean_use) * most / capacity);
  return std::min(p.total_k, static_cast<int64_t>(mean * p.batch));
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
  for (Fill const& fill : kFills) {
    fills.push_back({p, fill.weight});
    fills.back().problem.total_k = used_keys(p, fill.use);
  }
  return fills;
}

}  // namespace flash::plan
