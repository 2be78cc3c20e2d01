#include "params/head_dims.h"
#include "plan/cost.h"

namespace flash::plan {
namespace {

constexpr int kWarpgroupRows = 64;
constexpr int kMostSplits = 32;  // as many as BlockRange::split counts in 32 bits

// Launches' worth of time until a kernel whose code is in no cache begins to compute.
constexpr double kColdStart = 1.3;
// Bytes that results of splits may take.
constexpr double kMostBytes = 256 << 20;

// Kernels that were not measured take the time of their products; their choices differ by the order
// of tiles alone.
KernelTimes times_of(Machine const& m, Kernel const& k, ForwardTile tile) {
  float const step = counted_step(m, k, 2. * k.block_m * k.block_n * (k.head_dim + k.head_dim_v));
  bool const measured = k.sm == 90 && k.plain;
  auto const& rows = k.query_codes ? m.forward_fp8 : k.codes ? m.forward_codes : m.forward;
  return times_of(measured ? rows : std::span<RowTimes const>{}, k, static_cast<int>(tile),
                  {step, step});
}

double bytes_of_splits(Problem const& p, int splits) {
  return kSum * splits * double(p.total_q) * p.heads_q * (p.head_dim_v + 1);
}

// The row blocks of a choice, and what they take. A strip of them is a head of a sequence, or a KV
// head with all query heads that share it, or one KV split of these. Where only the device knows
// the lengths, numbers are averages.
struct ForwardCost {
  Problem const& p;
  Machine const& m;
  Kernel const& k;
  ForwardChoice c;

  bool packs = c.tile == ForwardTile::PackGqa || c.tile == ForwardTile::Split;
  int block_n = k.block_n_of(c.tile);
  int warpgroup_rows = std::min(k.block_m, kWarpgroupRows);
  int warpgroups = k.block_m / warpgroup_rows;
  int of_warpgroup = packs ? warpgroup_rows / p.group() : warpgroup_rows;  // queries
  int queries = of_warpgroup * warpgroups;                                 // of a row block
  double sharing = packs ? 1 : p.group();          // strips of the same keys
  double heads = sharing * p.heads_kv * c.splits;  // strips of one sequence
  double strips = p.batch * heads;                 // of all sequences
  double ordered = p.varlen_q ? heads : strips;    // that an order of tiles distinguishes
  double most = num_blocks(p.seqlen_q, queries);   // row blocks of the longest sequence
  bool rows_known = most <= 1 || p.total_q == int64_t(p.batch) * p.seqlen_q;
  double of_strip = std::max(rows_known ? most : p.mean_q() / queries + 0.5, 1.);
  double tiles = strips * of_strip;
  double steps = steps_of(p.mean_q(), p.mean_k()).mean / c.splits;  // of a row block

  double us() const {
    return kColdStart * m.launch + overlapped(compute_us(), memory_us()) + merge_us();
  }

  // The orders of tiles that are worth a prediction: strips side by side. Equal tiles: few heads
  // side by side, which share keys. Unequal ones even out among many; against a cache memory counts
  // more. One row block a head, or one wave, needs no order.
  std::vector<int> widths() const {
    if (c.splits > 1 || of_strip <= 1 || tiles <= k.resident) {
      return {width_of(c.splits > 1 ? 1 : strips)};
    }
    bool const unequal = p.used_k && p.batch > 1;
    return {width_of(p.unmasked() ? 0.25 : unequal ? 1. : 8.), width_of(2)};
  }

 private:
  // About so many waves of tiles, in groups that do not separate heads that share keys, nor splits.
  int width_of(double waves) const {
    double const alike = sharing * c.splits;
    return static_cast<int>(alike) *
           even_width(waves * k.resident / of_strip / alike, ordered / alike);
  }

  // Blocks that a row block of a sequence sees.
  Steps steps_of(double q, double keys) const {
    double const rows = p.alike() ? q : std::min(q, keys);
    return plan::steps_of(queries, block_n, rows, keys, p.mask.left, p.mask.right, p.alike());
  }

  // Tiles take different times under a mask; the longest tiles of each round of strips come first.
  double compute_us() const {
    auto const [fixed, full_step] = times_of(m, k, c.tile);
    // The share of warpgroups that have rows.
    double const rest = p.mean_q() - (of_strip - 1) * queries;
    double const last_rows = std::clamp(divide_up(rest, of_warpgroup) / warpgroups, 0., 1.);
    double const filled = rows_known ? (of_strip - 1 + last_rows) / of_strip : 1;
    double const step = full_step * (1 + filled) / 2;
    double const most_k = std::max<double>(p.seqlen_k, p.mean_k());
    double const whole = std::max(steps_of(p.seqlen_q, most_k).longest, steps * c.splits);
    double const longest = c.splits > 1 ? std::ceil(whole / c.splits) : whole;
    // The longest tile begins with the last round of strips. If only lengths of keys differ, it may
    // be in any strip: a quarter of the strips is taken to follow.
    bool const any = p.used_k && !p.varlen_q && p.batch > 1;
    double const last = any ? std::max(strips / 4, 1.) : last_round(ordered, c.side_by_side);
    return queue_us(tiles, k.resident, fixed + steps * step, fixed + longest * step,
                    last * std::max(most, of_strip));
  }

  // The time of memory: Q and O come once; K and V once or, where L2 does not keep them, as often
  // as they are read.
  double memory_us() const {
    double const row = kElement * (p.head_dim + p.head_dim_v), width = c.side_by_side;
    double const key = p.codes ? row / kElement : row;
    // The KV heads that are at work at a time, and the tiles that read the same keys.
    double const at_work = std::clamp(std::max(width, k.resident / of_strip) / sharing, 1.,
                                      std::max(strips / sharing, 1.));
    double const together = std::max(k.resident / at_work, std::min(width, sharing));
    double const keys = p.mean_k(), span = std::min(steps * block_n, keys);
    double const seen = p.limits_left() ? std::min(keys, p.mean_q() + p.mask.left) : keys;
    double const once = seen * p.batch * p.heads_kv;
    double const again = std::max(tiles * span / together - once, 0.);
    double const rows = double(p.total_q) * p.heads_q;
    // As many bytes of Q and O are on their way.
    double const touched = 2 * at_work * keys / c.splits * key;
    return ((once + missed(m, touched) * again) * key + rows * row) / m.memory;
  }

  // Splits are loaded four at a time, after their LSE, by a launch that begins early.
  double merge_us() const {
    double const waits = 1 + divide_up(c.splits, 4), bytes = 2 * bytes_of_splits(p, c.splits);
    return c.splits == 1 ? 0 : waits * m.merge_wait + bytes / m.memory;
  }
};

std::vector<ForwardChoice> candidates(Problem const& p, Machine const& m, Kernel const& k) {
  std::vector<ForwardChoice> all;
  auto const add = [&](ForwardTile tile, int splits) {
    for (int const width : ForwardCost{p, m, k, {tile, splits, 1}}.widths()) {
      all.push_back({tile, splits, width});
    }
  };
  // A choice by the average length would depend on the other sequences.
  bool const one_tile = p.batch_invariant && p.varlen_q;
  // Long tiles of pages and splits keep no largest logits.
  bool const long_of_pages = has_long_paged_tile(k.second_block_n, k.query_codes) && p.whole_rows &&
                             p.head_dim == k.head_dim && p.head_dim_v == k.head_dim_v &&
                             p.page_boxes && !p.max_logits;
  // Kernels of pairs of CTAs have neither pack-GQA nor splits.
  bool const heads_share = k.sm == 90 && k.plain && !k.query_codes && p.heads_apart &&
                           p.group() <= kWarpgroupRows && !is_wide(k.head_dim, k.head_dim_v);
  bool const packs = heads_share && p.group() > 1 && !one_tile;
  // Beside decode, row blocks are numbered by the fewest queries of a long sequence, and most of
  // the numbers of one query head's have no rows: CTAs draw them in vain. Decode reads memory all
  // the time, so tiles that read the same keys follow each other.
  if (p.beside_decode) {
    return {{packs ? ForwardTile::PackGqa : ForwardTile::First, 1, 1}};
  }
  add(ForwardTile::First, 1);
  if (k.second_block_n > 0 && !one_tile && (p.page_size == 0 || long_of_pages)) {
    add(ForwardTile::Second, 1);
  }
  if (packs) {
    add(ForwardTile::PackGqa, 1);
  }
  ForwardCost const whole{p, m, k, {ForwardTile::First, 1, 1}};
  bool const fills_gpu = p.alike() && whole.tiles >= k.resident;
  if (heads_share && !fills_gpu && !p.batch_invariant && !p.max_logits) {
    int const most = p.num_splits == 0 ? kMostSplits : p.num_splits;
    for (int splits = 2; splits <= std::min(most, kMostSplits); splits *= 2) {
      if (bytes_of_splits(p, splits) <= kMostBytes) {
        add(ForwardTile::Split, splits);
      }
    }
  }
  return all;
}

}  // namespace

double predicted_us(Problem const& p, Machine const& m, Kernel const& k,
                    ForwardChoice const& choice) {
  return ForwardCost{p, m, k, choice}.us();
}

std::vector<ForwardPlan> forward_choices(Problem const& p, Machine const& m, Kernel const& k) {
  if (p.batch == 0 || p.total_q == 0 || p.heads_q == 0 || p.heads_kv == 0) {
    return {{{ForwardTile::First, 1, 1}, 0}};
  }
  Problem const own = p.beside_decode ? p.part(p.long_ones(), p.seqlen_q) : p;
  return predicted<ForwardCost>(candidates(p, m, k), fills_of(own), m, k);
}

double query_codes_us(Problem const& p, Machine const& m) {
  // Its launches look for the largest number, choose descales, and read all numbers once more.
  constexpr int kLaunches = 3;
  constexpr double kBytes = 2 * kElement + 1;
  return kLaunches * m.launch + kBytes * p.total_q * p.heads_q * p.head_dim / m.memory;
}

ForwardPlan plan_forward(Problem const& p, Machine const& m, Kernel const& k) {
  std::vector<ForwardPlan> choices = forward_choices(p, m, k);
  if (p.batch_invariant && !p.varlen_q && p.batch > 1) {
    // Bits depend on the tile and must not depend on the batch: choices with a lone sequence's tile
    // stay.
    Problem alone = p;
    alone.batch = 1;
    alone.total_q = p.seqlen_q;
    alone.total_k = p.seqlen_k;
    ForwardTile const tile = plan_forward(alone, m, k).choice.tile;
    std::erase_if(choices, [&](ForwardPlan const& c) { return c.choice.tile != tile; });
  }
  return best_of(choices);
}

}  // namespace flash::plan
