#include "plan/decode.h"

#include <limits>

#include "core/cluster_size.h"
#include "params/common.h"
#include "params/seqlens.h"
#include "plan/fills.h"

namespace flash::plan {
namespace {

// Where clusters are more than find room side by side, some multiprocessors have more CTAs than
// others and end later, by this part of what a CTA reads.
constexpr double kUneven = 0.25;
// A GPC's multiprocessors are no multiple of so many CTAs: clusters of this size and above find
// room side by side on this share of all multiprocessors.
constexpr int kLargeCluster = 8;
constexpr double kRoom = 0.75;
// A CTA of a cluster begins later than another, behind a CTA that ends, by this factor.
constexpr double kNextCluster = 1.4;
constexpr int kMinUnits = 2;  // of a piece

// The work of the decode kernel, in total and on average, and the time of each way to cut it.
class Work {
 public:
  Work(Problem const& p, Machine const& m, DecodeKernel const& kernel) : m_(m), kernel_(kernel) {
    double const rows = (p.varlen_q ? p.mean_q() : p.seqlen_q) * p.group();
    double const blocks = std::max(divide_up(rows, kernel.block_m), 1.);
    double const keys = visible(p, p.mean_k());
    double const bytes =
        kElement * (p.head_dim + p.head_dim_v) * p.heads_kv * p.batch * std::max(keys, 1.);
    ranges = p.varlen_q ? p.batch * blocks : p.batch;
    tiles = p.varlen_q ? p.heads_kv : p.heads_kv * blocks;
    longest_ = std::max(divide_up(visible(p, p.seqlen_k), kernel.unit), 1.);
    rows_ = std::min<double>(rows, kernel.block_m);
    mean_ = std::max(divide_up(keys, kernel.unit), 1.);
    memory_us_ = bytes / m.reads;
    unit_us_ = kernel.unit * kElement * (kernel.head_dim + kernel.head_dim_v) / m.sm_reads;
    bool const known = !p.varlen_q && (p.batch == 1 || !(p.used_k || p.varlen_k));
    search_us_ = known ? 0 : m.search * divide_up(p.batch, 32);
    auto const* measured = times_of(m.decode, kernel.head_dim, kernel.head_dim_v);
    times_ = measured ? *measured : KernelTimes{8.f, 1.f};
  }

  double us(KeySplit const& s) const {
    int const cluster = 1 << s.cluster_log2;
    double const begin = times_.begin + (cluster > 1 ? m_.cluster_block * cluster : 0);
    if (s.max_splits == 1) {
      return begin + attend_us(ranges * tiles * cluster, divide_up(longest_, cluster), cluster, 0);
    }
    // What core/split_schedule.h will find. A sequence's last piece is half as long as the others,
    // on average.
    double const whole = std::max(s.pieces - ranges / 2, 1.);
    double const units = std::max<double>(ranges * mean_ / whole, s.min_units);
    double const most = std::min(std::max(units, longest_ / s.max_splits), longest_);
    double const pieces = std::max(ranges * mean_ / most + ranges / 2, ranges),
                 splits = longest_ / most;
    double const merge_us =
        m_.merge_round + divide_up(rows_, kernel_.rows_at_once) * m_.merge_row * (1 + splits / 16);
    return begin + attend_us(pieces * tiles, most, 1, search_us_) + search_us_ +
           (splits > 1 ? merge_us : 0);
  }

  double ranges;  // of keys: one of each sequence, or of each row block of a varlen one
  double tiles;   // that see a range, and are cut alike

 private:
  // The time of so many CTAs that have a piece of the keys each, alone or in clusters, but for the
  // beginning of the first. longest: units of the longest piece. search_us: of each CTA.
  double attend_us(double count, double longest, int cluster, double search_us) const {
    double const of_sm = count / m_.sm_count, resident = kernel_.blocks_per_sm;
    double const mean = ranges * tiles * mean_ / count;  // units
    double busy = 0, uneven = 0;
    if (of_sm > (cluster >= kLargeCluster ? kRoom : 1)) {
      double const next = (m_.next_block + search_us) * (cluster > 1 ? kNextCluster : 1);
      busy = of_sm * mean * unit_us_ + std::max(of_sm - 1, 0.) * next;
      uneven = cluster > 1 ? kUneven : 0;
    }
    double const us = overlapped(busy, memory_us_) + uneven * mean * unit_us_;
    // What is left of the longest piece when the others end on average.
    double const left = std::max(longest - std::max(of_sm / resident, 1.) * mean, 0.);
    return std::max(us + left * times_.step, overlapped(longest * times_.step, memory_us_));
  }

  Machine const& m_;
  DecodeKernel const& kernel_;
  double longest_;    // units of keys of a tile of the longest sequence
  double mean_;       // of an average one
  double rows_;       // of a tile
  double memory_us_;  // that the keys take to come from memory
  double unit_us_;    // that a multiprocessor takes for a unit's bytes
  double search_us_;  // that CTAs search their pieces from lengths that the device knows
  KernelTimes times_;
};

// All choices, the simpler ones first. alone: the GPU has no other work.
std::vector<DecodeChoice> choices_of(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                                     bool alone) {
  std::vector<Filled> const fills = fills_of(p);
  std::vector<Work> works;
  for (Filled const& fill : fills) {
    works.emplace_back(fill.problem, m, kernel);
  }
  Work const& w = works.front();
  std::vector<DecodeChoice> choices;
  choices.reserve(2 * kMostClusterLog2 + 1);
  auto const add = [&](KeySplit const& s) {
    choices.push_back({s, mean_us(fills, [&](size_t i) { return works[i].us(s); })});
  };
  int const units = static_cast<int>(divide_up(p.seqlen_k, kernel.unit));
  if (p.num_splits > 1 && !p.batch_invariant) {
    // As many pieces as the caller says, or as there are keys for.
    constexpr int any = std::numeric_limits<int>::max();
    add({.pieces = any, .extra = any, .max_splits = std::clamp(units, 1, p.num_splits)});
    return choices;
  }
  add({});
  if (p.num_splits == 1 || p.batch_invariant) {
    return choices;
  }
  for (int const blocks : {1, 2, 4 * kernel.blocks_per_sm}) {
    int const pieces = static_cast<int>(double(m.sm_count) * blocks / w.tiles);
    if (pieces > w.ranges) {
      add({.pieces = pieces,
           .extra = static_cast<int>(pieces - int64_t(w.ranges)),
           .max_splits = std::max((units + kMinUnits - 1) / kMinUnits, 1),
           .min_units = kMinUnits});
    }
  }
  for (int log2 = 1; kernel.clusters && alone && log2 <= kMostClusterLog2; ++log2) {
    add({.cluster_log2 = log2});
  }
  return choices;
}

// The most queries of a sequence, as far as the host can know.
int64_t longest_q(Problem const& p) {
  return p.varlen_q ? std::min<int64_t>(p.seqlen_q, p.total_q) : p.seqlen_q;
}

// The sequences of few queries beside those of many. They are taken to have one query, which is the
// most likely.
Problem few_of(Problem p) {
  double const long_ones = double(p.total_q - p.batch) / std::max(p.seqlen_q - 1, 1);
  p.batch = std::clamp(static_cast<int>(p.batch - long_ones), 1, p.batch);
  p.total_q = p.batch;
  p.total_k = std::min(p.total_k, int64_t(p.batch) * p.seqlen_k);
  p.seqlen_q = 1;
  return p;
}

// Whether the forward kernel should not compute what the decode kernel can: it would need a copy of
// the keys, or load pages without Hopper's loads; or a sequence's bits would depend on others.
bool must_decode(Problem const& p, Machine const& m) {
  bool const cache = p.cached || p.page_size > 0;
  return p.odd_rows || p.keys == KeyLayout::Pages || (cache && m.sm != 90) ||
         (cache && (p.num_splits > 1 || p.batch_invariant));
}

}  // namespace

int decodable_queries(Problem const& p) {
  int64_t const rows = longest_q(p) * p.group();
  if (rows == 0 || p.batch == 0 || p.heads_q == 0 || p.dropout ||
      (p.batch_invariant && p.page_size == 0)) {
    return 0;
  }
  bool const mixed = p.varlen_q && p.page_size > 0 && (p.batch > 1 || p.batch_invariant);
  return rows <= kMostDecodeRows ? kAllQueries : mixed ? kMostDecodeRows / p.group() : 0;
}

std::vector<DecodeChoice> decode_choices(Problem const& p, Machine const& m,
                                         DecodeKernel const& kernel) {
  int const few_q = decodable_queries(p);
  bool const alone = few_q == kAllQueries;
  return few_q > 0 ? choices_of(alone ? p : few_of(p), m, kernel, alone)
                   : std::vector<DecodeChoice>{};
}

DecodePlan plan_decode(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                       double forward_us) {
  std::vector<DecodeChoice> const choices = decode_choices(p, m, kernel);
  if (choices.empty()) {
    return {0, {}, forward_us};
  }
  int const few_q = decodable_queries(p);
  auto const [split, us] = best_of(choices);
  bool const decodes = few_q != kAllQueries || must_decode(p, m) || us <= forward_us;
  return decodes ? DecodePlan{few_q, split, us} : DecodePlan{0, {}, forward_us};
}

}  // namespace flash::plan
