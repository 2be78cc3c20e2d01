#include "plan/decode.h"

#include <limits>

#include "core/cluster_size.h"
#include "params/seqlens.h"

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

KernelTimes times_of(Machine const& m, DecodeKernel const& kernel) {
  auto const* measured = times_of(m.decode, kernel.head_dim, kernel.head_dim_v);
  return measured ? *measured : KernelTimes{8.f, 1.f};
}

// The tiles of the decode kernel, cut in one way, and what they take.
struct Work {
  Problem const& p;
  Machine const& m;
  DecodeKernel const& kernel;
  KeySplit s;

  int cluster = 1 << s.cluster_log2;
  double rows = p.mean_q() * p.group();
  double blocks = std::max(divide_up(rows, kernel.block_m), 1.);
  // Ranges of keys: one of each sequence, or of each row block of a varlen one.
  double ranges = p.varlen_q ? p.batch * blocks : p.batch;
  double tiles = p.varlen_q ? p.heads_kv : p.heads_kv * blocks;  // that see a range, cut alike
  double keys = std::max(visible(p, p.mean_k()), 1.);
  // Units of keys of an average tile, and of one of the longest sequence.
  double mean = divide_up(keys, kernel.unit);
  double longest = std::max(divide_up(visible(p, p.seqlen_k), kernel.unit), 1.);

  double us() const {
    if (s.max_splits == 1) {
      double const together = cluster > 1 ? m.cluster_block * cluster : 0;
      return together + attend_us(ranges * tiles * cluster, divide_up(longest, cluster), 0);
    }
    // What core/split_schedule.h will find. A sequence's last piece is half as long as the others,
    // on average.
    double const whole = std::max(s.pieces - ranges / 2, 1.);
    double const units = std::max<double>(ranges * mean / whole, s.min_units);
    double const most = std::min(std::max(units, longest / s.max_splits), longest);
    double const pieces = std::max(ranges * mean / most + ranges / 2, ranges);
    // CTAs search their pieces from lengths that the device knows.
    bool const known = !p.varlen_q && (p.batch == 1 || !(p.used_k || p.varlen_k));
    double const search_us = known ? 0 : m.search * divide_up(p.batch, 32);
    return attend_us(pieces * tiles, most, search_us) + search_us + merge_us(longest / most);
  }

 private:
  // The time of so many CTAs that have a piece of the keys each, alone or in clusters. piece: units
  // of the longest one. search_us: of each CTA.
  double attend_us(double count, double piece, double search_us) const {
    auto const [begin, step] = times_of(m, kernel);
    // That the keys take to come from memory, and that a multiprocessor takes for a unit of them.
    double const row = kElement * (p.head_dim + p.head_dim_v) * p.heads_kv;
    double const memory_us = row * p.batch * keys / m.reads;
    double const unit_us =
        kernel.unit * kElement * (kernel.head_dim + kernel.head_dim_v) / m.sm_reads;
    double const of_sm = count / m.sm_count, units = ranges * tiles * mean / count;
    double busy = 0, uneven = 0;
    if (of_sm > (cluster >= kLargeCluster ? kRoom : 1)) {
      double const next = (m.next_block + search_us) * (cluster > 1 ? kNextCluster : 1);
      busy = of_sm * units * unit_us + std::max(of_sm - 1, 0.) * next;
      uneven = cluster > 1 ? kUneven : 0;
    }
    double const us = overlapped(busy, memory_us) + uneven * units * unit_us;
    // What is left of the longest piece when the others end on average.
    double const left = std::max(piece - std::max(of_sm / kernel.blocks_per_sm, 1.) * units, 0.);
    return begin + std::max(us + left * step, overlapped(piece * step, memory_us));
  }

  double merge_us(double splits) const {
    double const of_tile = std::min<double>(rows, kernel.block_m);
    double const rounds = divide_up(of_tile, kernel.rows_at_once);
    return splits > 1 ? m.merge_round + rounds * m.merge_row * (1 + splits / 16) : 0;
  }
};

// The simpler ones come first. alone: the GPU has no other work.
std::vector<KeySplit> candidates(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                                 bool alone) {
  if (p.num_splits == 1 || p.batch_invariant) {
    return {KeySplit{}};
  }
  int const units = std::max(static_cast<int>(divide_up(p.seqlen_k, kernel.unit)), 1);
  if (p.num_splits > 1) {
    // As many pieces as the caller says, or as there are keys for.
    constexpr int any = std::numeric_limits<int>::max();
    return {{.pieces = any, .extra = any, .max_splits = std::min(units, p.num_splits)}};
  }
  std::vector<KeySplit> all = {KeySplit{}};
  Work const work{p, m, kernel, {}};
  for (int const blocks : {1, 2, 4 * kernel.blocks_per_sm}) {
    int const pieces = static_cast<int>(double(m.sm_count) * blocks / work.tiles);
    if (pieces > work.ranges) {
      all.push_back({.pieces = pieces,
                     .extra = pieces - static_cast<int>(work.ranges),
                     .max_splits = (units + kMinUnits - 1) / kMinUnits,
                     .min_units = kMinUnits});
    }
  }
  for (int log2 = 1; kernel.clusters && alone && log2 <= kMostClusterLog2; ++log2) {
    all.push_back({.cluster_log2 = log2});
  }
  return all;
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
  return p.odd_rows || p.keys == KeyLayout::Pages ||
         (cache && (m.sm != 90 || p.num_splits > 1 || p.batch_invariant));
}

}  // namespace

int decodable_queries(Problem const& p) {
  // The most queries of a sequence, as far as the host can know, with all heads of a group.
  int64_t const rows = std::min<int64_t>(p.seqlen_q, p.total_q) * p.group();
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
  if (few_q == 0) {
    return {};
  }
  bool const alone = few_q == kAllQueries;
  Problem const decoded = alone ? p : few_of(p);
  return predicted(candidates(decoded, m, kernel, alone), fills_of(decoded),
                   [&](Problem const& filled, KeySplit const& split) {
                     return Work{filled, m, kernel, split}.us();
                   });
}

DecodePlan plan_decode(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                       double forward_us) {
  int const few_q = decodable_queries(p);
  DecodePlan const forward{0, {}, forward_us};
  if (few_q == 0) {
    return forward;
  }
  auto const [split, us] = best_of(decode_choices(p, m, kernel));
  bool const decodes = few_q != kAllQueries || must_decode(p, m) || us <= forward_us;
  return decodes ? DecodePlan{few_q, split, us} : forward;
}

}  // namespace flash::plan
