#include "plan/forward.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <optional>

#include "core/tile_scheduler.h"
#include "core/work_tile.h"

namespace flash::plan {
namespace {

constexpr int kWarpgroupRows = 64;

// The part of a launch's time until the kernel computes, alone or early behind another launch.
constexpr double kLaunch = 0.61;
// The wait for a row's numbers from L2, µs.
constexpr double kMergeWait = 0.75;
// The part of a step's time that it takes however few warpgroups have rows.
constexpr double kAlone = 0.24;
// The first multiprocessor runs out of work this part of an average tile before all others.
constexpr double kEarly = 0.69;
// If computing and reading take equally long, this part of one comes on top of the other.
constexpr double kUnhidden = 0.09;

// Row blocks of a call, all of one shape. A strip of them is a head of a sequence, or a KV head
// with all query heads that share it, or one KV split of these.
struct RowBlocks {
  double of_strip;    // on average
  double of_longest;  // in a strip of the longest sequence
  double strips;      // of all sequences
  int heads;          // strips of one sequence
  double steps;       // of a row block, on average
  double longest;     // steps, at most
  double filled;      // share of its warpgroups that have rows, on average
  double filled_longest;
};

// The shape of a row block.
struct Rows {
  int of_warpgroup;  // queries
  int warpgroups;
  int heads;  // query heads, or KV heads

  int queries() const { return of_warpgroup * warpgroups; }
  // The share of warpgroups that have rows in a row block with so many queries.
  double filled(double rows) const {
    return std::clamp(std::ceil(rows / of_warpgroup) / warpgroups, 0., 1.);
  }
};

Rows rows_of(Problem const& p, ForwardKernel const& kernel, ForwardTile tile) {
  if (tile == ForwardTile::First || tile == ForwardTile::Second) {
    return {kWarpgroupRows, kernel.block_m / kWarpgroupRows, p.heads_q};
  }
  return {kWarpgroupRows / p.group(), kernel.block_m / kWarpgroupRows, p.heads_kv};
}

// The mean of x, clamped to [0, most], over x in [from, to].
double mean_limited(double from, double to, double most) {
  auto const area = [&](double x) {
    double const inside = std::clamp(x, 0., most);
    return inside * inside / 2 + most * (x > most ? x - most : 0);
  };
  return to > from ? (area(to) - area(from)) / (to - from) : std::clamp(from, 0., most);
}

// Steps of a row block, on average and at most, in a sequence with q rows and k keys. partial: the
// share of the KV block at an end of the seen keys that is not seen.
struct Seen {
  double steps;
  double longest;
};

Seen seen(Problem const& p, int rows, int block_n, double q, double k, double partial) {
  double const of_block = std::min<double>(rows, q), last = q - of_block;  // row of the last block
  double const end = k - q + p.mask.right + of_block, begin = k - q - p.mask.left;
  bool const left = p.limits_left(), right = p.limits_right();
  double const span = (right ? mean_limited(end, end + last, k) : k) -
                      (left ? mean_limited(begin, begin + last, k) : 0);
  double const most = left && right ? std::min(k, p.mask.left + p.mask.right + of_block)
                      : right       ? std::clamp(end + last, 0., k)
                                    : k - (left ? std::clamp(begin, 0., k) : 0);
  double const steps = std::max(span, 0.) / block_n + partial * (1 + left);
  return {steps, std::max(most / block_n + partial, steps)};
}

// Where only the device knows the lengths, these are averages: an average row block belongs to a
// longer sequence than the average sequence, and its keys end anywhere in a KV block.
RowBlocks row_blocks(Problem const& p, Rows const& rows, int block_n) {
  int const queries = rows.queries();
  bool const rows_known = p.total_q == int64_t(p.batch) * p.seqlen_q, known = p.alike();
  double const most = num_m_blocks(p.seqlen_q, queries), mean_q = p.mean_q();
  double const blocks =
      rows_known || most <= 1 ? std::max(most, 1.) : std::max(mean_q / queries + 0.5, 1.);
  double const longest_k = std::max<double>(p.seqlen_k, p.mean_k());
  double const spread = p.packed_q ? 1. / 3 : 0;  // as if they were up to the longest evenly
  double const k = p.mean_k() + spread * (longest_k - p.mean_k());
  double const q = std::min(mean_q + spread * (p.seqlen_q - mean_q), known ? mean_q : k);
  double const partial = !known     ? 0.5
                         : p.full() ? std::ceil(k / block_n) - k / block_n
                                    : 0.5 - 0.5 * std::gcd(queries, block_n) / block_n;
  Seen const s = seen(p, queries, block_n, q, k, partial);
  double const longest =
      known ? s.longest
            : seen(p, queries, block_n, std::min<double>(p.seqlen_q, longest_k), longest_k, partial)
                  .longest;
  double const half = (rows.warpgroups + 1.) / (2 * rows.warpgroups);
  double const last = rows_known  ? rows.filled(mean_q - (blocks - 1) * queries)
                      : most <= 1 ? rows.filled(mean_q)
                                  : half;
  return {blocks,
          std::max(most, blocks),
          double(p.batch) * rows.heads,
          rows.heads,
          s.steps,
          std::max(s.steps, longest),
          (blocks - 1 + last) / blocks,
          most > 1 ? 1 : rows.filled(p.seqlen_q)};
}

// Kernels that were not measured take the time of their products; their choices differ by the order
// of tiles alone.
KernelTimes times_of(Machine const& m, ForwardKernel const& kernel, ForwardTile tile) {
  auto const of_row = std::ranges::find_if(m.forward, [&](ForwardTimes const& t) {
    return t.head_dim == kernel.head_dim && t.head_dim_v == kernel.head_dim_v;
  });
  if (kernel.sm != 90 || !kernel.plain || of_row == m.forward.end()) {
    double const flops =
        2. * kernel.block_m * kernel.block_n * (kernel.head_dim + kernel.head_dim_v);
    float const step = static_cast<float>(flops * kernel.blocks_per_sm / m.mma_flops);
    return {step, step};
  }
  switch (tile) {
    case ForwardTile::First:
      return of_row->first;
    case ForwardTile::Second:
      return of_row->second;
    case ForwardTile::Packed:
      return of_row->packed;
    default:
      return of_row->split;
  }
}

// Tiles take different times under a mask; the longest tiles of each group of strips come first.
double compute_us(Problem const& p, RowBlocks const& blocks, KernelTimes const& times,
                  int side_by_side, double resident) {
  auto const of = [&](double steps, double filled) {
    return times.begin + steps * times.step * (kAlone + (1 - kAlone) * filled);
  };
  double const mean = of(blocks.steps, blocks.filled);
  double const longest = std::max(of(blocks.longest, blocks.filled_longest), mean);
  double const waves = blocks.strips * blocks.of_strip / resident;
  double const strips = p.packed_q ? blocks.heads : blocks.strips;
  double const width = std::min<double>(side_by_side, strips);
  // The longest tile of all begins with the last group of strips; where lengths of keys alone
  // differ, with any strip.
  bool const any = p.used_k && !p.packed_q;
  double const last_width = any ? 1 : strips - (std::ceil(strips / width) - 1) * width;
  double const last_waves = last_width * blocks.of_longest / resident;
  // 1: the shortest takes next to nothing, 0: all take the same.
  double const unequal = std::clamp(2 * (longest - mean) / longest, 0., 1.);
  double const shortest = std::max(2 * mean - longest, 0.);
  double const late =
      shortest + (longest - shortest) * std::min(1., 1 / std::max(last_waves, 1e-9)) / 2;
  double const idle = (1 - unequal) * (std::ceil(waves - 1e-9) - waves) * mean + unequal * late / 2;
  double const before_longest = std::max(waves - last_waves - kEarly, 0.) * mean;
  return std::max(waves * mean + idle, before_longest + longest);
}

// The time of memory: Q and O come once; K and V once or, where L2 does not keep them, as often as
// they are read.
double memory_us(Problem const& p, Machine const& m, RowBlocks const& blocks, int block_n,
                 ForwardChoice const& choice, double resident) {
  constexpr double kElement = 2;
  double const row = kElement * (p.head_dim + p.head_dim_v);
  double const sharing = double(blocks.heads) / p.heads_kv / choice.splits;
  // The KV heads that are at work at a time.
  double const heads =
      std::clamp(std::max<double>(choice.side_by_side, resident / blocks.of_strip) / sharing, 1.,
                 std::max(blocks.strips / sharing, 1.));
  double const span = std::min(blocks.steps * block_n, p.mean_k());
  double const in_use = p.limits_left() ? span : p.mean_k() / choice.splits;
  // The other half is for Q and O on their way.
  double const full = heads * in_use * row / (double(m.l2_share) * double(m.l2_bytes) / 2);
  double const square = full * full, miss = square * square / (1 + square * square);
  double const tiles = blocks.strips * blocks.of_strip;
  double const neighbours = std::min<double>(choice.side_by_side, sharing);
  double const together = std::clamp(resident / heads, neighbours, blocks.of_strip * sharing);
  double const seen = p.limits_left() ? std::min(p.mean_k(), p.mean_q() + p.mask.left) : p.mean_k();
  double const once = seen * p.batch * p.heads_kv;
  double const again = std::max(tiles * span / together - once, 0.);
  double const rows = double(p.total_q) * p.heads_q;
  return (once + miss * again + rows) * row / m.memory;
}

// The splits of few rows are loaded at once, those of more rows four at a time, behind their LSE.
double merge_us(Problem const& p, Machine const& m, int splits) {
  constexpr int kRowsAtOnce = 512, kSplitsAtOnce = 16, kTogether = 4;
  double const rows = double(p.total_q) * p.heads_q, bytes = rows * (p.head_dim_v + 1) * 4.;
  bool const at_once = rows <= kRowsAtOnce && splits <= kSplitsAtOnce;
  double const waits = at_once ? 1 : 1 + std::ceil(double(splits) / kTogether);
  return kLaunch * m.launch + waits * kMergeWait + 2 * splits * bytes / (m.memory * m.l2_gain);
}

// The time of both at once.
double overlapped(double a, double b) {
  double const longer = std::max(a, b), shorter = std::min(a, b);
  return longer > 0 ? longer + kUnhidden * shorter * shorter / longer : 0;
}

double predicted(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                 RowBlocks const& whole, ForwardChoice const& choice) {
  int const block_n = block_n_of(kernel, choice.tile);
  KernelTimes const times = times_of(m, kernel, choice.tile);
  double const resident = double(m.sm_count) * kernel.blocks_per_sm;
  RowBlocks blocks = whole;
  if (choice.splits > 1) {
    blocks.strips *= choice.splits;
    blocks.heads *= choice.splits;
    blocks.steps /= choice.splits;
    blocks.longest = std::ceil(blocks.longest / choice.splits);
  }
  double const us = overlapped(compute_us(p, blocks, times, choice.side_by_side, resident),
                               memory_us(p, m, blocks, block_n, choice, resident));
  return kLaunch * m.launch + us + (choice.splits > 1 ? merge_us(p, m, choice.splits) : 0);
}

int64_t workspace_of(Problem const& p, ForwardChoice const& choice) {
  int64_t const rows = p.total_q * p.heads_q;
  return choice.splits == 1 ? 0
                            : choice.splits * rows * (p.head_dim_v + 1) * int64_t(sizeof(float));
}

// The choices that the kernel has, the simplest first.
class Candidates {
 public:
  // only: the tile, if it has been chosen.
  Candidates(Problem const& p, Machine const& m, ForwardKernel const& kernel,
             std::optional<ForwardTile> only)
      : p_(p), kernel_(kernel), only_(only), resident_(double(m.sm_count) * kernel.blocks_per_sm) {}

  // visit(ForwardChoice, RowBlocks)
  template <class Visit>
  void each(Visit visit) const {
    for (ForwardTile const tile : {ForwardTile::First, ForwardTile::Second, ForwardTile::Packed}) {
      if (tile == only_.value_or(tile) && is_possible(p_, kernel_, tile)) {
        RowBlocks const blocks = blocks_of(tile);
        each_width(blocks, [&](int width) { visit(ForwardChoice{tile, 1, width}, blocks); });
      }
    }
    if (!only_ && may_split()) {
      each_split(visit);
    }
  }

 private:
  RowBlocks blocks_of(ForwardTile tile) const {
    return row_blocks(p_, rows_of(p_, kernel_, tile), block_n_of(kernel_, tile));
  }

  // Numbers of heads side by side: first the one that suits most calls, then all, half of them, and
  // so on down to the heads that share keys. With one row block a head there is no order. Beside
  // decode, which reads memory all the time, tiles that read the same keys follow each other.
  template <class Visit>
  void each_width(RowBlocks const& blocks, Visit visit) const {
    // In waves of tiles. Unequal tiles even out only within a group of heads; a group of more than
    // kMostWaves gains nothing.
    constexpr double kEqual = 0.25, kUnequal = 2.5, kMostWaves = 8;
    int const heads = heads_of(blocks), sharing = std::max(blocks.heads / p_.heads_kv, 1);
    if (p_.beside_decode || blocks.of_strip <= 1 || blocks.strips * blocks.of_strip <= resident_) {
      return visit(p_.beside_decode ? 1 : heads);
    }
    double const usual = (p_.full() ? kEqual : kUnequal) * resident_ / blocks.of_strip;
    visit(even_width(static_cast<int64_t>(usual), sharing, heads));
    double const widest = std::min<double>(kMostWaves * resident_ / blocks.of_strip, heads);
    for (int width = std::max(static_cast<int>(widest), sharing); width >= sharing; width /= 2) {
      visit(even_width(width, sharing, heads));
    }
  }

  bool may_split() const {
    RowBlocks const first = blocks_of(ForwardTile::First);
    bool const full = p_.alike() && first.strips * first.of_strip >= resident_;
    return !full && is_possible(p_, kernel_, ForwardTile::Split);
  }

  template <class Visit>
  void each_split(Visit visit) const {
    constexpr int kSplits[] = {2, 3, 4, 6, 8, 12, 16, 24, 32};
    constexpr int64_t kMostBytes = 256 << 20;
    RowBlocks const blocks = blocks_of(ForwardTile::Split);
    double const most =
        p_.num_splits > 0 ? std::min<double>(p_.num_splits, blocks.longest) : blocks.longest;
    for (int const splits : kSplits) {
      RowBlocks split = blocks;
      split.heads *= splits;
      split.strips *= splits;
      ForwardChoice const choice{ForwardTile::Split, splits, one_wave(split)};
      if (splits > most || workspace_of(p_, choice) > kMostBytes) {
        return;
      }
      visit(choice, blocks);
    }
  }

  // The heads that an order of tiles distinguishes.
  int heads_of(RowBlocks const& blocks) const {
    double const heads = p_.packed_q ? blocks.heads : blocks.strips;
    return static_cast<int>(std::min<double>(heads, std::numeric_limits<int>::max()));
  }

  // Heads that together have as many tiles as there are resident CTAs.
  int one_wave(RowBlocks const& blocks) const {
    int const heads = heads_of(blocks), sharing = std::max(blocks.heads / p_.heads_kv, 1);
    return blocks.of_strip <= 1
               ? heads
               : even_width(static_cast<int64_t>(resident_ / blocks.of_strip), sharing, heads);
  }

  // A group width near this one whose groups are all alike and do not separate heads that share
  // keys.
  static int even_width(int64_t width, int sharing, int heads) {
    int const of_keys = std::max(heads / sharing, 1);
    return sharing *
           even_group(static_cast<int>(std::clamp<int64_t>(width / sharing, 1, of_keys)), of_keys);
  }

  Problem const& p_;
  ForwardKernel const& kernel_;
  std::optional<ForwardTile> only_;
  double resident_;
};

bool is_empty(Problem const& p) {
  return p.batch == 0 || p.total_q == 0 || p.heads_q == 0 || p.heads_kv == 0;
}

// A choice wins over a simpler one only if it takes less than this share of its time.
constexpr double kSimpler = 0.99;

ForwardPlan best_of(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                    std::optional<ForwardTile> only) {
  ForwardPlan best{{ForwardTile::First, 1, 1}, std::numeric_limits<double>::infinity(), 0};
  Candidates(p, m, kernel, only).each([&](ForwardChoice const& choice, RowBlocks const& blocks) {
    double const us = predicted(p, m, kernel, blocks, choice);
    if (us < kSimpler * best.us) {
      best = {choice, us, workspace_of(p, choice)};
    }
  });
  return best;
}

}  // namespace

double forward_us(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                  ForwardChoice const& choice) {
  Rows const rows = rows_of(p, kernel, choice.tile);
  return predicted(p, m, kernel, row_blocks(p, rows, block_n_of(kernel, choice.tile)), choice);
}

bool is_possible(Problem const& p, ForwardKernel const& kernel, ForwardTile tile) {
  bool const heads_share = kernel.sm == 90 && kernel.plain && p.heads_apart && p.heads_kv > 0 &&
                           p.group() <= kWarpgroupRows;
  if (p.largest_logits && kernel.plain &&
      (tile != ForwardTile::First && (tile != ForwardTile::Second || p.page_size > 0))) {
    return false;  // keep none
  }
  // A choice by the average length would depend on the other sequences.
  bool const one_tile = p.batch_invariant && p.packed_q;
  switch (tile) {
    case ForwardTile::First:
      return true;
    case ForwardTile::Second: {
      bool const of_pages = kernel.second_block_n > kMostPagedKeys && p.whole_rows &&
                            p.head_dim == kernel.head_dim && p.head_dim_v == kernel.head_dim_v &&
                            p.keys == KeyLayout::PageBoxes && !p.beside_decode;
      return kernel.second_block_n > 0 && !one_tile && (p.page_size == 0 || of_pages);
    }
    case ForwardTile::Packed:
      return heads_share && p.group() > 1 && !one_tile;
    default:
      return heads_share && !p.batch_invariant && p.num_splits != 1 && !p.beside_decode;
  }
}

int forward_choices(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                    ForwardChoice* choices) {
  int count = 0;
  if (!is_empty(p)) {
    Candidates(p, m, kernel, {}).each([&](ForwardChoice const& choice, RowBlocks const&) {
      choices[count++] = choice;
    });
  }
  return count;
}

ForwardPlan plan_forward(Problem const& p, Machine const& m, ForwardKernel const& kernel) {
  if (is_empty(p)) {
    return {{ForwardTile::First, 1, 1}, 0, 0};
  }
  if (!p.batch_invariant || p.packed_q) {
    return best_of(p, m, kernel, {});
  }
  Problem alone = p;  // bits depend on the tile
  alone.batch = 1;
  alone.total_q = p.seqlen_q;
  alone.total_k = p.seqlen_k;
  return best_of(p, m, kernel, best_of(alone, m, kernel, {}).choice.tile);
}

}  // namespace flash::plan
