#include <numeric>

#include "core/cluster_size.h"
#include "core/merge_rounds.h"
#include "core/varlen_rows.h"
#include "params/head_dims.h"
#include "params/seqlens.h"
#include "plan/cost.h"
#include "plan/resident.h"

namespace flash::plan {
namespace {

// A cluster waits until one GPC has room for all of its CTAs. Each doubling of its size adds this
// part of the time until a next CTA begins.
constexpr double kNextCluster = 0.5;
// Where sequences differ, CTAs or clusters that did not begin at once end later than the others by
// this part of the time of the longest one.
constexpr double kLate = 0.25;
// Pieces are at least so many times as many as sequences, unless an SM has one CTA at a time: where
// lengths are alike, fewer would hardly be shorter than whole sequences.
constexpr double kFewestPieces = 1.4;
// Each row block of a sequence beyond the first brings this part of its keys from memory once more:
// row blocks begin one after the other, and L2 does not keep all that the first one has read.
constexpr double kReadAgain = 0.3;
constexpr int kMinUnits = 2;  // of a piece
// The most rows of a sequence, all heads of a KV head, for which the decode kernel is considered.
// With more it would read the keys at least five times, once for 16 rows.
constexpr int kMostDecodeRows = 64;

// Indices of RowTimes::kernels, by what the keys are.
constexpr int kOf16Bits = 0, kOfCodes = 1;

// The tiles of the decode kernel, cut in one way, and what they take.
struct DecodeCost {
  Problem const& p;
  Machine const& m;
  Kernel const& k;
  PieceCut s;

  bool cut = s.max_pieces > 1;
  // Where warps share keys, an SM has one CTA at a time, and no other fills its waits.
  bool one_each = is_wide(k.head_dim, k.head_dim_v);
  int cluster = 1 << s.cluster_log2;
  double rows = p.mean_q() * p.group();
  double blocks = std::max(divide_up(rows, k.block_m), 1.);
  // Ranges of keys: one of each sequence, or of each row block of a varlen one.
  double ranges = p.varlen_q ? p.batch * blocks : p.batch;
  double tiles = p.varlen_q ? p.heads_kv : p.heads_kv * blocks;  // that see a range, cut alike
  double keys = std::max(visible(p, p.mean_k()), 1.);
  // Units of keys of an average tile, and of one of the longest sequence.
  double mean = divide_up(keys, k.block_n);
  double longest = std::max(divide_up(visible(p, p.seqlen_k), k.block_n), 1.);
  double bytes_each = k.codes ? 1 : kElement;

  // CTAs of clusters that all SMs have room for; CTAs, or clusters, that run at a time.
  int of_clusters = m.sm_count * kMostClusterBlocks;
  int at_a_time =
      clusters_at_a_time(cluster > 1 ? std::min(k.resident, of_clusters) : k.resident, cluster);

  // CTAs of a varlen batch that find no rows: the host knows only how many row blocks there are at
  // most.
  double surplus = p.varlen_q ? std::max(most_blocks() - ranges, 0.) * tiles * cluster : 0;

  double us() const {
    // sm80's latent rows, which alone have two head dims and merge in the kernel, were not timed;
    // the machine's times at these dims are those of Hopper's.
    constexpr KernelTimes kOthers{8.f, 1.f};
    bool const timed = k.merges_after || k.head_dim == k.head_dim_v;
    auto const [fixed, step] =
        timed ? times_of(m.decode, k, k.codes ? kOfCodes : kOf16Bits, kOthers) : kOthers;
    // CTAs search their pieces from lengths that the device knows.
    bool const known = !p.varlen_q && (p.batch == 1 || !(p.used_k || p.varlen_k));
    double const search = cut && !known ? m.search * divide_up(p.batch, 32) : 0;
    // The units of the longest piece, all CTAs, and the units of an average one.
    double const piece = cut ? longest_piece() : divide_up(longest, cluster);
    double const ctas =
        tiles * (!cut       ? ranges * cluster
                 : one_each ? std::min(ranges * divide_up(longest, piece), ranges + s.extra)
                            : std::max(ranges * mean / piece + ranges / 2, ranges));
    double const of_sm = one_each ? std::ceil(ctas / (cluster * at_a_time)) : ctas / m.sm_count;
    double const units = ranges * tiles * mean / ctas;
    double const read_us = k.block_n * bytes_each * (k.head_dim + k.head_dim_v) /
                           (k.codes ? m.code_reads : m.sm_reads);
    double const unit_us = one_each ? std::max(read_us, double(step)) : read_us;
    // What a further CTA adds, and one that computes where an SM has one at a time.
    double const further = m.next_block * (1 + kNextCluster * s.cluster_log2) + search;
    double const next = one_each ? fixed : further;
    double busy = further * surplus / m.sm_count;
    if (of_sm > 1) {
      // Where all run at once, the busiest SM has a whole number of them. Pieces are as
      // many as fill all SMs.
      double const whole = std::min(std::ceil(of_sm), double(at_a_time) * cluster / m.sm_count);
      busy += (cut ? of_sm : std::max(of_sm, whole)) * units * unit_us + (of_sm - 1) * next;
    }
    double const read = p.heads_kv * p.batch * keys * (1 + kReadAgain * (blocks - 1));
    double const memory_us = bytes_each * (p.head_dim + p.head_dim_v) * read / m.reads;
    double const us = overlapped(busy, memory_us);
    // What is left of the longest piece when the others end. They end one by one, so half of what
    // it has beyond the average is done beside them.
    double const rounds = std::max(ctas / (cluster * at_a_time), 1.);
    double const left = std::max(piece - rounds * units, 0.) / 2 * step;
    double const late = cut || one_each ? 0 : late_us(us, fixed, piece * step);
    return fixed + (cluster > 1 ? m.cluster_block * cluster : 0) + search +
           std::max(us + std::max(left, late), overlapped(piece * step, memory_us)) +
           merge_us(longest / piece);
  }

 private:
  double most_blocks() const {
    return most_row_blocks(p.total_q, VarlenRows::count(p.batch), p.group(), k.block_m);
  }

  // What the last CTAs, or clusters, take when the others have ended, where not all run at once. If
  // all take the same, the last ones begin when the others end, and have the memory for themselves.
  double late_us(double us, double fixed, double longest_us) const {
    double const all = ranges * tiles, rounds = std::ceil(all / at_a_time);
    if (rounds <= 1) {
      return 0;
    }
    double const last = (all - (rounds - 1) * at_a_time) / all;
    double const alike = std::clamp(2 * mean / longest - 1, 0., 1.);
    return std::max((1 - alike) * kLate * longest_us,
                    alike * std::max(fixed + longest_us - us * last, 0.));
  }

  // What core/piece_schedule.h will find. A sequence's last piece is half as long as the others, on
  // average.
  double longest_piece() const {
    if (one_each) {
      double const least = std::max(longest / s.max_pieces, 1.);
      double const of_each = std::floor(s.slices / ranges);  // where all are as long
      return mean == longest ? divide_up(longest, std::clamp<double>(of_each, 1, s.max_pieces))
                             : std::clamp(ranges * mean / s.slices, least, longest);
    }
    double const whole = std::max(s.slices - ranges / 2, 1.);
    double const units = std::max<double>(ranges * mean / whole, s.min_units);
    return std::min(std::max(units, longest / std::min<double>(s.max_pieces, s.extra + 1.)),
                    longest);
  }

  double merge_us(double pieces) const {
    if (k.merges_after) {
      double const numbers = pieces > 1 ? std::min<double>(rows, k.block_m) * k.head_dim_v : 0;
      // A launch that merges reads the rows that every CTA has written; CTAs of a cluster send them
      // once, at a third of that rate.
      return numbers * sizeof(float) / m.sm_reads * (cut ? 2 : 3) + (cut ? m.launch : 0);
    }
    double const each = std::min<double>(rows, k.block_m), passes = divide_up(each, k.rows_at_once);
    double const members = std::max(std::floor(kMergedRows / each), 2.);
    double us = 0;
    for (double n = cut ? pieces : 1; n > 1; n = divide_up(n, members)) {
      us += m.merge_round + passes * m.merge_row * (1 + std::min(n, members) / 16);
    }
    return us;
  }
};

// The simpler ones come first. alone: the GPU has no other work.
std::vector<PieceCut> candidates(Problem const& p, Machine const& m, Kernel const& k, bool alone) {
  if (p.num_splits == 1 || p.batch_invariant) {
    return {PieceCut{}};
  }
  int const units = std::max(static_cast<int>(divide_up(p.seqlen_k, k.block_n)), 1);
  if (p.num_splits > 1) {
    // As many pieces as the caller says, or as there are keys for.
    return {
        {.slices = kAnySlices, .extra = kAnySlices, .max_pieces = std::min(units, p.num_splits)}};
  }
  std::vector<PieceCut> all = {PieceCut{}};
  DecodeCost const whole{p, m, k, {}};
  bool const has_clusters = k.clusters && alone;
  double const fewest = whole.one_each ? 1 : kFewestPieces;
  auto const add = [&](double ctas, double most) {
    int const slices = static_cast<int>(ctas / whole.tiles);
    if (slices > whole.ranges && slices >= fewest * whole.ranges) {
      all.push_back({.slices = slices,
                     .extra = static_cast<int>(most / whole.tiles - whole.ranges),
                     .max_pieces = (units + kMinUnits - 1) / kMinUnits,
                     .min_units = kMinUnits});
    }
  };
  if (whole.one_each) {
    // Whole waves of pieces; one wave more may be used where lengths differ.
    double const waves = std::floor(whole.ranges * whole.tiles / k.resident) + 1;
    add(waves * k.resident, (waves + 1) * k.resident);
  } else {
    for (int const ctas : {m.sm_count, 2 * m.sm_count, 4 * k.resident}) {
      add(ctas, ctas);
    }
  }
  for (int log2 = 1; has_clusters && log2 <= kMostClusterLog2; ++log2) {
    all.push_back({.cluster_log2 = log2});
  }
  return all;
}

// Whether the forward kernel should not compute what the decode kernel can: it would need a copy of
// the keys, or load pages without Hopper's loads; a sequence's bits would depend on others; or the
// decode kernel alone reads the keys (latent rows, codes), the GPU is not Hopper, or the caller
// asks for pieces.
bool must_decode(Problem const& p, Machine const& m) {
  bool const cache = p.cached || p.page_size > 0;
  return p.only_decoded || p.odd_rows || (p.page_size > 0 && !p.page_boxes) ||
         (cache && (m.sm != 90 || p.num_splits > 1 || p.batch_invariant));
}

}  // namespace

int64_t most_row_blocks(int64_t total_q, int64_t sequences, int group, int block_m) {
  int64_t const lacking = block_m - std::gcd(group, block_m);
  return (total_q * group + std::min(sequences, total_q) * lacking) / block_m;
}

int decodable_queries(Problem const& p) {
  // The most queries of a sequence, as far as the host can know, with all heads of a group.
  // What only this kernel reads it decodes, whatever the caller says of the longest sequence.
  int64_t const longest = p.only_decoded && p.varlen_q ? p.total_q : p.seqlen_q;
  int64_t const rows = std::min(longest, p.total_q) * p.group();
  if (rows == 0 || p.batch == 0 || p.heads_q == 0 || p.dropout ||
      (p.batch_invariant && p.page_size == 0)) {
    return 0;
  }
  bool const mixed = p.varlen_q && p.page_size > 0 && (p.batch > 1 || p.batch_invariant);
  return p.only_decoded || rows <= kMostDecodeRows ? kAllQueries
         : mixed                                   ? kMostDecodeRows / p.group()
                                                   : 0;
}

std::vector<DecodeChoice> decode_choices(Problem const& p, Machine const& m, Kernel const& k) {
  int const few_q = decodable_queries(p);
  if (few_q == 0) {
    return {};
  }
  bool const alone = few_q == kAllQueries;
  // Sequences of few queries are taken to have one, which is the most likely.
  Problem const decoded = alone ? p : p.part(std::max(p.batch - p.long_ones(), 1), 1);
  return predicted<DecodeCost>(candidates(decoded, m, k, alone), fills_of(decoded), m, k);
}

DecodePlan plan_decode(Problem const& p, Machine const& m, Kernel const& k, double forward_us) {
  int const few_q = decodable_queries(p);
  DecodePlan const forward{0, {}, forward_us};
  if (few_q == 0) {
    return forward;
  }
  auto const [cut, us] = best_of(decode_choices(p, m, k));
  bool const decodes = few_q != kAllQueries || must_decode(p, m) || us <= forward_us;
  return decodes ? DecodePlan{few_q, cut, us} : forward;
}

}  // namespace flash::plan
