#include "plan/decode.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/cluster_size.h"
#include "params/common.h"
#include "params/seqlens.h"

namespace flash::plan {
namespace {

// The part of a cache's capacity that sequences are expected to use on average, beside the longest,
// which uses all.
constexpr double kMeanUse = 0.2;
// Each CTA of a cluster adds this, because the others wait for it, µs.
constexpr double kClusterBlock = 0.07;
// Row blocks that read the same keys drift apart: for each further row block, this part of the keys
// that L2 does not hold comes once more from memory, times the CTAs of a multiprocessor. Clusters,
// which do not lie side by side, drift twice as far.
constexpr double kDrift = 0.15;
// A round of merging, and in it each row of a thread, of up to 16 pieces, µs.
constexpr double kMergeRound = 1.6, kMergeRow = 0.48;
// The search of a piece among 32 sequences, µs: their lengths come from memory.
constexpr double kSearch = 1.7;
// The simpler choice wins unless the other takes less than this share of its time, because lengths
// are guessed.
constexpr double kWorthIt = 0.95;

// Most units of a cluster's CTA: with more, CTAs wait for the last one longer than merging takes.
constexpr int kMostUnits = 64;
constexpr int kMinUnits = 2;
constexpr int kManyBlocks = 4;  // times the resident CTAs, where lengths differ much

double divide_up(double n, double d) { return std::ceil(n / d); }

// The work of the decode kernel, in total and on average. Tiles that see the same keys are cut
// alike: all tiles of a sequence, or those of one of its row blocks.
struct Work {
  double groups;        // of tiles that are cut alike
  double tiles;         // of a group
  double rows;          // of a tile
  double mean;          // units of keys of a tile
  double longest;       // the same for the longest sequence
  double memory;        // µs that the keys take to come from memory
  double memory_apart;  // the same if heads are not read side by side
  double again;         // share of the keys that row blocks may read once more each
  double search;        // µs that CTAs search their pieces from lengths that the device knows
  bool alike;           // all sequences are as long as the longest
  double sm_step;       // µs that a multiprocessor takes for a unit's bytes
  KernelTimes times;

  double units() const { return groups * tiles * mean; }
};

// CTAs that have a piece of the keys each.
struct Pieces {
  double count;
  double longest;  // units
  double splits;   // of the longest tile
  double per_sm;   // resident CTAs
  bool cluster = false;
};

KernelTimes times_of(Machine const& m, DecodeKernel const& kernel) {
  auto const of_row = std::ranges::find_if(m.decode, [&](DecodeTimes const& t) {
    return t.head_dim == kernel.head_dim && t.head_dim_v == kernel.head_dim_v;
  });
  constexpr KernelTimes kUnmeasured{5.f, 1.f};
  return of_row == m.decode.end() ? kUnmeasured : of_row->pieces;
}

// The keys of a tile that any of its rows sees.
double visible(Problem const& p, double keys) {
  return p.mask.left < 0 ? keys : std::min(keys, double(p.mask.left) + p.seqlen_q);
}

// Bytes that are read for each byte of a row of one head if its neighbours, which share lines with
// it, are not read at the same time.
double bytes_of_lines(Problem const& p) {
  constexpr int kLine = 128;
  int const row = p.head_dim + p.head_dim_v;  // bytes, of K and V on average
  return p.heads_kv > 1 ? double(row + kLine - std::gcd(row, kLine)) / row : 1;
}

Work work_of(Problem const& p, Machine const& m, DecodeKernel const& kernel) {
  double const rows = (p.packed_q ? p.mean_q() : p.seqlen_q) * p.group();
  double const blocks = std::max(divide_up(rows, kernel.block_m), 1.);
  double const mean = visible(p, p.mean_k()), longest = visible(p, p.seqlen_k);
  double const bytes = 2. * (p.head_dim + p.head_dim_v) * p.heads_kv * p.batch * mean;
  Work w{};
  w.times = times_of(m, kernel);
  w.groups = p.packed_q ? p.batch * blocks : p.batch;
  w.tiles = p.packed_q ? p.heads_kv : p.heads_kv * blocks;
  w.rows = std::min<double>(rows, kernel.block_m);
  w.mean = std::max(divide_up(mean, kernel.unit), 1.);
  w.longest = std::max(divide_up(longest, kernel.unit), 1.);
  w.memory = bytes / m.reads;
  w.memory_apart = bytes_of_lines(p) * w.memory;
  w.again = (blocks - 1) * std::max(1 - double(m.l2_bytes) / std::max(bytes, 1.), 0.);
  w.sm_step = 2. * kernel.unit * (p.head_dim + p.head_dim_v) / m.sm_reads;
  bool const known = !p.packed_q && (p.batch == 1 || !(p.used_k || p.packed_k));
  w.search = known ? 0 : kSearch * divide_up(p.batch, 32);
  w.alike = w.mean == w.longest;
  return w;
}

// The pieces that core/split_schedule.h will find.
Pieces pieces_of(Work const& w, KeySplit const& s, DecodeKernel const& kernel) {
  double const tiles = w.groups * w.tiles;
  double const per_sm = kernel.blocks_per_sm;
  if (s.cluster_log2 > 0) {
    double const blocks = 1 << s.cluster_log2;
    // As many CTAs as registers allow; larger clusters find few GPCs with room for all their CTAs.
    double const fit = s.cluster_log2 == 1 ? 2 : 1;
    return {tiles * blocks, divide_up(w.longest, blocks), 1, std::min(fit, per_sm), true};
  }
  if (s.max_splits == 1) {
    return {tiles, w.longest, 1, per_sm};
  }
  if (w.alike) {
    double const splits = std::clamp<double>(std::floor(s.pieces / w.groups), 1, s.max_splits);
    return {tiles * splits, divide_up(w.mean, splits), splits, per_sm};
  }
  // A sequence's last piece is half as long as the others, on average.
  double const whole = std::max(s.pieces - w.groups / 2, 1.);
  double const units = std::max<double>(w.groups * w.mean / whole, s.min_units);
  double const longest = std::min(std::max(units, w.longest / s.max_splits), w.longest);
  double const pieces = w.groups * w.mean / longest + w.groups / 2;
  return {std::max(pieces, w.groups) * w.tiles, longest, w.longest / longest, per_sm};
}

// The time of both at once, when neither hides the other completely.
double overlapped(double a, double b) {
  double const x = a * a, y = b * b;
  return std::sqrt(std::sqrt(x * x + y * y));
}

// The time of all pieces: in waves, if they are more than the resident CTAs.
double attend_us(Work const& w, Machine const& m, Pieces const& p) {
  double const resident = m.sm_count * p.per_sm, step = w.times.step;
  double const crowd = std::min(divide_up(p.count, m.sm_count), p.per_sm);
  double const drift = kDrift * crowd * w.again;
  double const memory = p.cluster ? w.memory_apart * (1 + 2 * drift) : w.memory * (1 + drift);
  auto const wave = [&](double blocks, double share, double crowd) {
    double const each = w.units() / blocks * std::max(crowd * w.sm_step, step);
    return share * overlapped(each, memory);
  };
  double const running = std::min(p.count, resident);
  double us = 0;
  if (p.count <= resident) {
    us = wave(p.count, 1, divide_up(p.count, m.sm_count));
  } else if (w.alike && !p.cluster) {
    // The pieces of the last wave crowd on the multiprocessors that are done first.
    double const full = std::floor(p.count / resident) * resident, rest = p.count - full;
    us = wave(resident, full / p.count, p.per_sm);
    us += rest > 0 ? wave(rest, rest / p.count, p.per_sm) : 0;
  } else {
    us = wave(resident, 1, p.per_sm);
  }
  us += (p.count / running - 1) * w.times.begin;
  // The longest piece goes on when the others are done.
  return us + std::max(p.longest - w.units() / running, 0.) * step;
}

double merge_us(Work const& w, DecodeKernel const& kernel, double splits) {
  double const parts = std::floor(kernel.merged_rows / w.rows);
  double rounds = 1;
  for (double merged = parts; merged < splits; merged *= parts) {
    ++rounds;
  }
  double const row_us = kMergeRow * (1 + splits / 16);
  return rounds * kMergeRound + divide_up(w.rows, kernel.rows_at_once) * row_us;
}

double predict(Work const& w, Machine const& m, DecodeKernel const& kernel, KeySplit const& s,
               Pieces const& pieces) {
  double us = w.times.begin + attend_us(w, m, pieces);
  us += s.cluster_log2 > 0 ? kClusterBlock * (1 << s.cluster_log2) : 0;
  us += pieces.splits > 1 ? merge_us(w, kernel, pieces.splits) : 0;
  us += s.max_splits > 1 ? w.search : 0;
  return us;
}

// Cuts into so many pieces for each tile of a group, none too short to be worth its merging.
KeySplit cut(Problem const& p, Work const& w, DecodeKernel const& kernel, int64_t pieces) {
  int64_t const units = (int64_t(p.seqlen_k) + kernel.unit - 1) / kernel.unit;
  KeySplit s{};
  s.min_units = kMinUnits;
  s.pieces = static_cast<int>(pieces);
  s.extra = static_cast<int>(pieces - int64_t(w.groups));
  s.max_splits = static_cast<int>(std::max<int64_t>((units + kMinUnits - 1) / kMinUnits, 1));
  return s;
}

// Cuts into as many pieces as the caller says, or as there are keys for.
KeySplit cut_as_told(Problem const& p, DecodeKernel const& kernel) {
  constexpr int kAny = std::numeric_limits<int>::max();
  int64_t const units = (int64_t(p.seqlen_k) + kernel.unit - 1) / kernel.unit;
  KeySplit s{};
  s.pieces = s.extra = kAny;
  s.max_splits = static_cast<int>(std::clamp<int64_t>(units, 1, p.num_splits));
  return s;
}

// Calls visit(DecodeChoice), the simpler choices first. alone: the GPU has no other work. A choice
// has to be good both for caches that are filled as expected and for full ones, because both
// happen, so its time is the geometric mean.
template <class Visit>
void each_choice(Problem const& p, Machine const& m, DecodeKernel const& kernel, bool alone,
                 Visit visit) {
  Work const w = work_of(expected(p), m, kernel), full = work_of(p, m, kernel);
  auto const us = [&](Work const& work, KeySplit const& s) {
    return predict(work, m, kernel, s, pieces_of(work, s, kernel));
  };
  auto const consider = [&](KeySplit const& s) {
    visit(DecodeChoice{s, std::sqrt(us(w, s) * us(full, s))});
  };
  if (p.num_splits > 1 && !p.batch_invariant) {
    return consider(cut_as_told(p, kernel));
  }
  consider({});
  if (p.num_splits == 1 || p.batch_invariant) {
    return;
  }
  auto const filling = [&](int blocks) { return int64_t(double(m.sm_count) * blocks / w.tiles); };
  int const most = kernel.blocks_per_sm;
  // With hardly more pieces than sequences, the longest sequence would have two or three.
  constexpr double kLeastPieces = 1.2;
  for (int blocks : {1, 2, most, kManyBlocks * most}) {
    if (double(filling(blocks)) > kLeastPieces * w.groups) {
      consider(cut(p, w, kernel, filling(blocks)));
    }
  }
  for (int log2 = 1; kernel.clusters && alone && log2 <= kMostClusterLog2; ++log2) {
    if (w.longest <= kMostUnits << log2) {
      consider({.cluster_log2 = log2});
    }
  }
}

// The most queries of a sequence, as far as the host can know.
int64_t longest_q(Problem const& p) {
  return p.packed_q ? std::min<int64_t>(p.seqlen_q, p.total_q) : p.seqlen_q;
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

// The part of a call that the decode kernel can compute.
struct Decoded {
  Problem problem;
  int few_q;  // DecodePlan's; 0: nothing
  bool alone;
};

Decoded decoded_of(Problem const& p) {
  int64_t const rows = longest_q(p) * p.group();
  if (rows == 0 || p.batch == 0 || p.heads_q == 0 || p.dropout ||
      (p.batch_invariant && p.page_size == 0)) {
    return {p, 0, false};
  }
  if (rows <= kMostDecodeRows) {
    return {p, kAllQueries, true};
  }
  bool const mixed = p.packed_q && p.page_size > 0 && (p.batch > 1 || p.batch_invariant);
  int const few_q = mixed ? kMostDecodeRows / p.group() : 0;
  return few_q > 0 ? Decoded{few_of(p), few_q, false} : Decoded{p, 0, false};
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

int decode_choices(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                   DecodeChoice* choices) {
  Decoded const decoded = decoded_of(p);
  int count = 0;
  if (decoded.few_q > 0) {
    each_choice(decoded.problem, m, kernel, decoded.alone,
                [&](DecodeChoice const& choice) { choices[count++] = choice; });
  }
  return count;
}

DecodePlan plan_decode(Problem const& p, Machine const& m, DecodeKernel const& kernel,
                       double forward_us) {
  DecodePlan const none{0, {}, forward_us};
  Decoded const decoded = decoded_of(p);
  if (decoded.few_q == 0) {
    return none;
  }
  DecodePlan best{decoded.few_q, {}, std::numeric_limits<double>::infinity()};
  each_choice(decoded.problem, m, kernel, decoded.alone, [&](DecodeChoice const& choice) {
    if (choice.us < kWorthIt * best.us) {
      best.split = choice.split;
      best.us = choice.us;
    }
  });
  bool const decodes = !decoded.alone || must_decode(p, m) || kWorthIt * best.us <= forward_us;
  return decodes ? best : none;
}

int decodable_queries(Problem const& p) { return decoded_of(p).few_q; }

}  // namespace flash::plan
