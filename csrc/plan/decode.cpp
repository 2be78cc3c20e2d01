#include "plan/decode.h"

#include <limits>

#include "core/cluster_size.h"
#include "params/common.h"
#include "params/seqlens.h"

namespace flash::plan {
namespace {

// The part of a cache's capacity that sequences are expected to use on average, beside the longest,
// which uses all.
constexpr double kMeanUse = 0.2;
// Row blocks that read the same keys drift apart: for each further row block, this part of the keys
// that L2 does not hold comes once more from memory, times the CTAs of a multiprocessor. Clusters,
// which do not lie side by side, drift twice as far.
constexpr double kKeyDrift = 0.15;
// The simpler choice wins unless the other takes less than this share of its time, because lengths
// are guessed.
constexpr double kWorthIt = 0.95;
// A batch is cut if its tiles have so many pieces on average: with fewer, the longest sequence
// would have two or three.
constexpr double kLeastPieces = 1.5;
// Most units of a cluster's CTA: with more, CTAs wait for the last one longer than merging takes.
constexpr int kMostUnits = 64;
constexpr int kMinUnits = 2;  // of a piece

double divide_up(double n, double d) { return std::ceil(n / d); }

// The keys of a tile that any of its rows sees.
double visible(Problem const& p, double keys) {
  return p.mask.left < 0 ? keys : std::min(keys, double(p.mask.left) + p.seqlen_q);
}

// The work of the decode kernel, in total and on average, and the time of each way to cut it. Tiles
// that see the same keys are cut alike: all tiles of a sequence, or those of one of its row blocks.
class Work {
 public:
  Work(Problem const& p, Machine const& m, DecodeKernel const& kernel) : m_(m), kernel_(kernel) {
    double const rows = (p.varlen_q ? p.mean_q() : p.seqlen_q) * p.group();
    double const blocks = std::max(divide_up(rows, kernel.block_m), 1.);
    double const keys = visible(p, p.mean_k());
    double const row = kElement * (p.head_dim + p.head_dim_v),
                 bytes = row * p.heads_kv * p.batch * keys;
    groups = p.varlen_q ? p.batch * blocks : p.batch;
    tiles = p.varlen_q ? p.heads_kv : p.heads_kv * blocks;
    longest = std::max(divide_up(visible(p, p.seqlen_k), kernel.unit), 1.);
    rows_ = std::min<double>(rows, kernel.block_m);
    mean_ = std::max(divide_up(keys, kernel.unit), 1.);
    memory_us_ = bytes / m.reads;
    again_ = (blocks - 1) * std::max(1 - double(m.l2_bytes) / std::max(bytes, 1.), 0.);
    unit_us_ = kernel.unit * row / m.sm_reads;
    bool const known = !p.varlen_q && (p.batch == 1 || !(p.used_k || p.varlen_k));
    search_us_ = known ? 0 : m.search * divide_up(p.batch, 32);
    auto const* measured = times_of(m.decode, kernel.head_dim, kernel.head_dim_v);
    times_ = measured ? *measured : KernelTimes{5.f, 1.f};
  }

  double us(KeySplit const& s) const {
    Pieces const pieces = pieces_of(s);
    return times_.begin + attend_us(pieces, s.cluster_log2 > 0) +
           (s.cluster_log2 > 0 ? m_.cluster_block * (1 << s.cluster_log2) : 0) +
           (pieces.splits > 1 ? merge_us(pieces.splits) : 0) + (s.max_splits > 1 ? search_us_ : 0);
  }

  double groups;   // of tiles that are cut alike
  double tiles;    // of a group
  double longest;  // units of keys of a tile of the longest sequence

 private:
  // CTAs that have a piece of the keys each.
  struct Pieces {
    double count;
    double longest;  // units
    double splits;   // of the longest tile
    double per_sm;   // resident CTAs
  };

  // The pieces that core/split_schedule.h will find.
  Pieces pieces_of(KeySplit const& s) const {
    double const per_sm = kernel_.blocks_per_sm;
    if (s.max_splits == 1) {
      // Of clusters as many CTAs as registers allow; larger ones find few GPCs with room for all
      // their CTAs.
      double const blocks = 1 << s.cluster_log2, fit = blocks == 1 ? per_sm : blocks == 2 ? 2 : 1;
      return {groups * tiles * blocks, divide_up(longest, blocks), 1, std::min(fit, per_sm)};
    }
    if (mean_ == longest) {
      double const splits = std::clamp<double>(std::floor(s.pieces / groups), 1, s.max_splits);
      return {groups * tiles * splits, divide_up(mean_, splits), splits, per_sm};
    }
    // A sequence's last piece is half as long as the others, on average.
    double const whole = std::max(s.pieces - groups / 2, 1.);
    double const units = std::max<double>(groups * mean_ / whole, s.min_units);
    double const most = std::min(std::max(units, longest / s.max_splits), longest);
    double const pieces = groups * mean_ / most + groups / 2;
    return {std::max(pieces, groups) * tiles, most, longest / most, per_sm};
  }

  // The time of all pieces: in waves, if they are more than the resident CTAs.
  double attend_us(Pieces const& p, bool cluster) const {
    double const resident = m_.sm_count * p.per_sm, units = groups * tiles * mean_;
    double const crowd = std::min(divide_up(p.count, m_.sm_count), p.per_sm);
    double const drift = (cluster ? 2 : 1) * kKeyDrift * crowd * again_;
    auto const wave = [&](double blocks, double crowd) {
      double const each = units / blocks * std::max(crowd * unit_us_, double(times_.step));
      return overlapped(each, memory_us_ * (1 + drift));
    };
    double const running = std::min(p.count, resident);
    double us = wave(running, crowd);
    if (p.count > resident && mean_ == longest && !cluster) {
      // The pieces of the last wave crowd on the multiprocessors that are done first.
      double const full = std::floor(p.count / resident) * resident, rest = p.count - full;
      us = full / p.count * us + (rest > 0 ? rest / p.count * wave(rest, p.per_sm) : 0);
    }
    // The longest piece goes on when the others are done.
    return us + (p.count / running - 1) * times_.begin +
           std::max(p.longest - units / running, 0.) * times_.step;
  }

  double merge_us(double splits) const {
    double const parts = std::floor(kernel_.merged_rows / rows_);
    double rounds = 1;
    for (double merged = parts; merged < splits; merged *= parts) {
      ++rounds;
    }
    double const row_us = m_.merge_row * (1 + splits / 16);
    return rounds * m_.merge_round + divide_up(rows_, kernel_.rows_at_once) * row_us;
  }

  Machine const& m_;
  DecodeKernel const& kernel_;
  double rows_;       // of a tile
  double mean_;       // units of keys of a tile
  double memory_us_;  // that the keys take to come from memory
  double again_;      // share of the keys that row blocks may read once more each
  double unit_us_;    // that a multiprocessor takes for a unit's bytes
  double search_us_;  // that CTAs search their pieces from lengths that the device knows
  KernelTimes times_;
};

// All choices, the simpler ones first. alone: the GPU has no other work. A choice has to be good
// both for caches that are filled as expected and for full ones, because both happen, so its time
// is the geometric mean.
std::vector<DecodeChoice> choices_of(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                                     bool alone) {
  Work const w(expected(p), m, kernel), full(p, m, kernel);
  std::vector<DecodeChoice> choices;
  choices.reserve(2 * kMostClusterLog2 + 1);
  auto const add = [&](KeySplit const& s) {
    choices.push_back({s, std::sqrt(w.us(s) * full.us(s))});
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
  for (int const blocks : {1, 2, kernel.blocks_per_sm, 4 * kernel.blocks_per_sm}) {
    int const pieces = static_cast<int>(double(m.sm_count) * blocks / w.tiles);
    if (pieces > kLeastPieces * w.groups) {
      add({.pieces = pieces,
           .extra = static_cast<int>(pieces - int64_t(w.groups)),
           .max_splits = std::max((units + kMinUnits - 1) / kMinUnits, 1),
           .min_units = kMinUnits});
    }
  }
  for (int log2 = 1; kernel.clusters && alone && log2 <= kMostClusterLog2; ++log2) {
    if (w.longest <= kMostUnits << log2) {
      add({.cluster_log2 = log2});
    }
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

Problem expected(Problem const& p) {
  Problem q = p;
  if (p.batch > 0 && (p.used_k || p.page_size > 0)) {
    double const use = kMeanUse + (1 - kMeanUse) / p.batch, capacity = std::max(p.seqlen_k, 1);
    // More sequences have all of the keys that a window shows.
    double const most = visible(p, capacity), mean = most * (1 - (1 - use) * most / capacity);
    q.total_k = std::min(p.total_k, static_cast<int64_t>(mean * p.batch));
  }
  return q;
}

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
  auto const [split, us] = best_of(choices, kWorthIt);
  bool const decodes = few_q != kAllQueries || must_decode(p, m) || kWorthIt * us <= forward_us;
  return decodes ? DecodePlan{few_q, split, us} : DecodePlan{0, {}, forward_us};
}

}  // namespace flash::plan
