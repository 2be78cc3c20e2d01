#include "plan/forward.h"

#include "core/tile_scheduler.h"
#include "plan/fills.h"

namespace flash::plan {
namespace {

constexpr int kWarpgroupRows = 64;

// The part of a launch's time until the kernel computes, alone or early behind another launch.
constexpr double kLaunch = 0.61;
// The part of a step's time that it takes however few warpgroups have rows.
constexpr double kAlone = 0.24;
// Where only the device knows the lengths, an average row block belongs to a sequence that is
// longer than the average one by this part of what the longest is: as if they were up to it evenly.
constexpr double kSpread = 1. / 3;
// Bytes that results of splits may take.
constexpr double kMostBytes = 256 << 20;

// Kernels that were not measured take the time of their products; their choices differ by the order
// of tiles alone.
KernelTimes times_of(Machine const& m, ForwardKernel const& kernel, ForwardTile tile) {
  auto const* measured = times_of(m.forward, kernel.head_dim, kernel.head_dim_v);
  if (kernel.sm == 90 && kernel.plain && measured) {
    return measured[static_cast<int>(tile)];
  }
  double const flops = 2. * kernel.block_m * kernel.block_n * (kernel.head_dim + kernel.head_dim_v);
  float const step = static_cast<float>(flops * kernel.blocks_per_sm / m.mma_flops);
  return {step, step};
}

double bytes_of_splits(Problem const& p, int splits) {
  return splits > 1 ? kSum * splits * double(p.total_q) * p.heads_q * (p.head_dim_v + 1) : 0;
}

// Row blocks of a call, all of one shape, and what they take. A strip of them is a head of a
// sequence, or a KV head with all query heads that share it, or one KV split of these.
class RowBlocks {
 public:
  // Where only the device knows the lengths, these are averages.
  RowBlocks(Problem const& p, Machine const& m, ForwardKernel const& kernel, ForwardTile tile,
            int splits)
      : p_(p),
        m_(m),
        times_(times_of(m, kernel, tile)),
        resident_(double(m.sm_count) * kernel.blocks_per_sm),
        block_n_(block_n_of(kernel, tile)),
        tile_(tile),
        splits_(splits) {
    bool const packs = tile == ForwardTile::PackGqa || tile == ForwardTile::Split;
    int const of_warpgroup = packs ? kWarpgroupRows / p.group() : kWarpgroupRows;  // queries
    int const warpgroups = kernel.block_m / kWarpgroupRows, queries = of_warpgroup * warpgroups;
    heads_ = (packs ? p.heads_kv : p.heads_q) * splits;
    strips_ = p.batch * heads_;
    double const most = num_m_blocks(p.seqlen_q, queries), mean_q = p.mean_q();
    bool const rows_known = most <= 1 || p.total_q == int64_t(p.batch) * p.seqlen_q;
    of_strip_ = std::max(rows_known ? most : mean_q / queries + 0.5, 1.);
    of_longest_ = std::max(most, of_strip_);
    auto const steps_for = [&](double rows, double keys) {
      return steps_of({queries, block_n_, rows, keys, p.mask.left, p.mask.right}, p.alike());
    };
    double const longest_k = std::max<double>(p.seqlen_k, p.mean_k());
    double const spread = p.varlen_q ? kSpread : 0;
    double const k = std::lerp(p.mean_k(), longest_k, spread);
    double const q = std::lerp(mean_q, p.seqlen_q, spread);
    steps_ = steps_for(p.alike() ? q : std::min(q, k), k);
    if (!p.alike()) {
      Steps const longest = steps_for(std::min<double>(p.seqlen_q, longest_k), longest_k);
      steps_.longest = std::max(steps_.mean, longest.longest);
    }
    if (splits > 1) {
      steps_ = {steps_.mean / splits, std::ceil(steps_.longest / splits)};
    }
    double const last = divide_up(mean_q - (of_strip_ - 1) * queries, of_warpgroup) / warpgroups;
    filled_ = rows_known ? (of_strip_ - 1 + std::clamp(last, 0., 1.)) / of_strip_ : 1;
  }

  double us(int side_by_side) const {
    return kLaunch * m_.launch + overlapped(compute_us(side_by_side), memory_us(side_by_side)) +
           (splits_ > 1 ? merge_us() : 0);
  }

  // The orders of tiles that are worth a prediction: strips side by side. Equal tiles: few heads
  // side by side, which share keys. Unequal ones even out among many; against a cache memory counts
  // more. One row block a head, or one wave, needs no order. Beside decode, which reads memory all
  // the time, tiles that read the same keys follow each other.
  std::vector<int> widths() const {
    if (p_.beside_decode) {
      return {1};
    }
    if (splits_ > 1) {
      return {width_of(1)};
    }
    if (of_strip_ <= 1 || tiles() <= resident_) {
      return {width_of(strips_)};
    }
    bool const unequal = p_.used_k && p_.batch > 1;
    int const first = width_of(p_.unmasked() ? 0.25 : unequal ? 1. : 8.), other = width_of(2);
    return first == other ? std::vector{first} : std::vector{first, other};
  }

  double tiles() const { return strips_ * of_strip_; }
  bool fill() const { return tiles() >= resident_; }

 private:
  // Strips that an order of tiles distinguishes.
  double ordered() const { return p_.varlen_q ? heads_ : strips_; }

  // About so many waves of tiles, in groups of heads that are alike and do not separate heads that
  // share keys.
  int width_of(double waves) const {
    double const sharing = std::max(std::floor(heads_ / p_.heads_kv), 1.);
    int const of_keys = static_cast<int>(std::clamp(ordered() / sharing, 1., 1e9));
    double const width = waves * resident_ / of_strip_ / sharing;
    return static_cast<int>(sharing) *
           even_group(static_cast<int>(std::clamp(width, 1., double(of_keys))), of_keys);
  }

  // Tiles take different times under a mask; the longest tiles of each group of strips come first.
  double compute_us(int side_by_side) const {
    double const step = times_.step * std::lerp(kAlone, 1, filled_);
    // The longest tile of all begins with the last group of strips; where lengths of keys alone
    // differ, with any strip, and a quarter of them comes after it.
    bool const any = p_.used_k && !p_.varlen_q && p_.batch > 1;
    double const last = any ? std::max(strips_ / 4, 1.)
                            : last_group(ordered(), std::min<double>(side_by_side, ordered()));
    return queue_us({tiles(), resident_, times_.begin + steps_.mean * step,
                     times_.begin + steps_.longest * step, last * of_longest_});
  }

  // The time of memory: Q and O come once; K and V once or, where L2 does not keep them, as often
  // as they are read.
  double memory_us(int side_by_side) const {
    double const row = kElement * (p_.head_dim + p_.head_dim_v);
    double const sharing = heads_ / p_.heads_kv / splits_;
    // The KV heads that are at work at a time, and the tiles that read the same keys.
    double const heads = std::clamp(std::max<double>(side_by_side, resident_ / of_strip_) / sharing,
                                    1., std::max(strips_ / sharing, 1.));
    double const together = std::max(resident_ / heads, std::min<double>(side_by_side, sharing));
    double const keys = p_.mean_k(), span = std::min(steps_.mean * block_n_, keys);
    double const seen = p_.limits_left() ? std::min(keys, p_.mean_q() + p_.mask.left) : keys;
    double const once = seen * p_.batch * p_.heads_kv;
    double const again = std::max(tiles() * span / together - once, 0.);
    double const rows = double(p_.total_q) * p_.heads_q;
    // As many bytes of Q and O are on their way.
    return (once + missed(m_, 2 * heads * keys / splits_ * row) * again + rows) * row / m_.memory;
  }

  // Splits are loaded four at a time, behind their LSE.
  double merge_us() const {
    double const waits = 1 + divide_up(splits_, 4);
    return kLaunch * m_.launch + waits * m_.merge_wait +
           2 * bytes_of_splits(p_, splits_) / (m_.memory * m_.l2_gain);
  }

  Problem const& p_;
  Machine const& m_;
  KernelTimes times_;
  double resident_;
  int block_n_;
  ForwardTile tile_;
  int splits_;
  double heads_;       // strips of one sequence
  double strips_;      // of all sequences
  double of_strip_;    // row blocks, on average
  double of_longest_;  // in a strip of the longest sequence
  Steps steps_;        // of a row block
  double filled_;      // share of its warpgroups that have rows, on average
};

bool is_empty(Problem const& p) {
  return p.batch == 0 || p.total_q == 0 || p.heads_q == 0 || p.heads_kv == 0;
}

}  // namespace

double forward_us(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                  ForwardChoice const& choice) {
  return RowBlocks(p, m, kernel, choice.tile, choice.splits).us(choice.side_by_side);
}

bool is_possible(Problem const& p, ForwardKernel const& kernel, ForwardTile tile) {
  bool const heads_share = kernel.sm == 90 && kernel.plain && p.heads_apart && p.heads_kv > 0 &&
                           p.group() <= kWarpgroupRows;
  bool const long_of_pages = tile == ForwardTile::Second && p.page_size > 0;
  if (p.largest_logits && kernel.plain && (tile == ForwardTile::Split || long_of_pages)) {
    return false;  // keep none
  }
  // A choice by the average length would depend on the other sequences.
  bool const one_tile = p.batch_invariant && p.varlen_q;
  switch (tile) {
    case ForwardTile::First:
      return true;
    case ForwardTile::Second: {
      bool const of_pages = kernel.second_block_n > kMostPagedKeys && p.whole_rows &&
                            p.head_dim == kernel.head_dim && p.head_dim_v == kernel.head_dim_v &&
                            p.keys == KeyLayout::PageBoxes && !p.beside_decode;
      return kernel.second_block_n > 0 && !one_tile && (p.page_size == 0 || of_pages);
    }
    case ForwardTile::PackGqa:
      return heads_share && p.group() > 1 && !one_tile;
    default:
      return heads_share && !p.batch_invariant && p.num_splits != 1 && !p.beside_decode;
  }
}

std::vector<ForwardPlan> forward_choices(Problem const& p, Machine const& m,
                                         ForwardKernel const& kernel) {
  if (is_empty(p)) {
    return {{{ForwardTile::First, 1, 1}, 0}};
  }
  std::vector<Filled> const fills = fills_of(p);
  std::vector<ForwardPlan> choices;
  auto const add = [&](ForwardTile tile, int splits) {
    std::vector<RowBlocks> blocks;
    for (Filled const& fill : fills) {
      blocks.emplace_back(fill.problem, m, kernel, tile, splits);
    }
    for (int const width : blocks.front().widths()) {
      double const us = mean_us(fills, [&](size_t i) { return blocks[i].us(width); });
      choices.push_back({{tile, splits, width}, us});
    }
  };
  for (ForwardTile const tile : {ForwardTile::First, ForwardTile::Second, ForwardTile::PackGqa}) {
    if (is_possible(p, kernel, tile)) {
      add(tile, 1);
    }
  }
  bool const full = p.alike() && RowBlocks(p, m, kernel, ForwardTile::First, 1).fill();
  if (full || !is_possible(p, kernel, ForwardTile::Split)) {
    return choices;
  }
  for (int const splits : {2, 4, 8, 16, 32}) {
    bool const allowed = p.num_splits == 0 || splits <= p.num_splits;
    if (allowed && bytes_of_splits(p, splits) <= kMostBytes) {
      add(ForwardTile::Split, splits);
    }
  }
  return choices;
}

ForwardPlan plan_forward(Problem const& p, Machine const& m, ForwardKernel const& kernel) {
  std::vector<ForwardPlan> choices = forward_choices(p, m, kernel);
  if (p.batch_invariant && !p.varlen_q && p.batch > 1) {
    // Bits depend on the tile, which is that of a sequence alone.
    Problem alone = p;
    alone.batch = 1;
    alone.total_q = p.seqlen_q;
    alone.total_k = p.seqlen_k;
    ForwardTile const tile = plan_forward(alone, m, kernel).choice.tile;
    std::erase_if(choices, [&](ForwardPlan const& c) { return c.choice.tile != tile; });
  }
  return best_of(choices);
}

}  // namespace flash::plan
