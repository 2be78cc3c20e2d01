#include "plan/forward.h"

#include <limits>
#include <optional>

#include "core/tile_scheduler.h"

namespace flash::plan {
namespace {

constexpr int kWarpgroupRows = 64;

// The part of a launch's time until the kernel computes, alone or early behind another launch.
constexpr double kLaunch = 0.61;
// The part of a step's time that it takes however few warpgroups have rows.
constexpr double kAlone = 0.24;
// Bytes that results of splits may take.
constexpr double kMostBytes = 256 << 20;

// Row blocks of a call, all of one shape. A strip of them is a head of a sequence, or a KV head
// with all query heads that share it, or one KV split of these.
struct RowBlocks {
  double of_strip;    // on average
  double of_longest;  // in a strip of the longest sequence
  double strips;      // of all sequences
  double heads;       // strips of one sequence
  Steps steps;        // of a row block
  double filled;      // share of its warpgroups that have rows, on average
  double filled_longest;
};

// Where only the device knows the lengths, these are averages: an average row block belongs to a
// longer sequence than the average sequence.
RowBlocks row_blocks(Problem const& p, ForwardKernel const& kernel, ForwardTile tile, int splits) {
  bool const packs = tile == ForwardTile::PackGqa || tile == ForwardTile::Split;
  int const of_warpgroup = packs ? kWarpgroupRows / p.group() : kWarpgroupRows;  // queries
  int const warpgroups = kernel.block_m / kWarpgroupRows, queries = of_warpgroup * warpgroups;
  double const heads = (packs ? p.heads_kv : p.heads_q) * splits;
  bool const rows_known = p.total_q == int64_t(p.batch) * p.seqlen_q, known = p.alike();
  double const most = num_m_blocks(p.seqlen_q, queries), mean_q = p.mean_q();
  double const blocks =
      rows_known || most <= 1 ? std::max(most, 1.) : std::max(mean_q / queries + 0.5, 1.);
  double const longest_k = std::max<double>(p.seqlen_k, p.mean_k());
  double const spread = p.varlen_q ? 1. / 3 : 0;  // as if they were up to the longest evenly
  double const k = p.mean_k() + spread * (longest_k - p.mean_k());
  double const q = std::min(mean_q + spread * (p.seqlen_q - mean_q), known ? mean_q : k);
  auto const steps_for = [&](double rows, double keys) {
    return steps_of(p, {queries, block_n_of(kernel, tile), rows, keys, p.mask.left, p.mask.right},
                    known);
  };
  Steps steps = steps_for(q, k);
  if (!known) {
    Steps const longest = steps_for(std::min<double>(p.seqlen_q, longest_k), longest_k);
    steps.longest = std::max(steps.mean, longest.longest);
  }
  if (splits > 1) {
    steps = {steps.mean / splits, std::ceil(steps.longest / splits)};
  }
  // The share of warpgroups that have rows in a row block with so many queries.
  auto const filled = [&](double rows) {
    return std::clamp(std::ceil(rows / of_warpgroup) / warpgroups, 0., 1.);
  };
  double const last = rows_known || most <= 1 ? filled(mean_q - (blocks - 1) * queries)
                                              : (warpgroups + 1.) / (2 * warpgroups);
  return {.of_strip = blocks,
          .of_longest = std::max(most, blocks),
          .strips = p.batch * heads,
          .heads = heads,
          .steps = steps,
          .filled = (blocks - 1 + last) / blocks,
          .filled_longest = most > 1 ? 1 : filled(p.seqlen_q)};
}

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

// Tiles take different times under a mask; the longest tiles of each group of strips come first.
double compute_us(Problem const& p, RowBlocks const& blocks, KernelTimes const& times,
                  int side_by_side, double resident) {
  auto const of = [&](double steps, double filled) {
    return times.begin + steps * times.step * (kAlone + (1 - kAlone) * filled);
  };
  double const strips = p.varlen_q ? blocks.heads : blocks.strips;
  double const width = std::min<double>(side_by_side, strips);
  // The longest tile of all begins with the last group of strips; where lengths of keys alone
  // differ, with any strip.
  bool const any = p.used_k && !p.varlen_q;
  double const last = any ? 1 : strips - (std::ceil(strips / width) - 1) * width;
  return queue_us({blocks.strips * blocks.of_strip, resident, of(blocks.steps.mean, blocks.filled),
                   of(blocks.steps.longest, blocks.filled_longest), last * blocks.of_longest});
}

// The time of memory: Q and O come once; K and V once or, where L2 does not keep them, as often as
// they are read.
double memory_us(Problem const& p, Machine const& m, RowBlocks const& blocks, int block_n,
                 ForwardChoice const& choice, double resident) {
  double const row = kElement * (p.head_dim + p.head_dim_v);
  double const sharing = blocks.heads / p.heads_kv / choice.splits;
  // The KV heads that are at work at a time, and the tiles that read the same keys.
  double const heads =
      std::clamp(std::max<double>(choice.side_by_side, resident / blocks.of_strip) / sharing, 1.,
                 std::max(blocks.strips / sharing, 1.));
  double const together =
      std::max(resident / heads, std::min<double>(choice.side_by_side, sharing));
  double const span = std::min(blocks.steps.mean * block_n, p.mean_k());
  double const in_use = p.limits_left() ? span : p.mean_k() / choice.splits;
  double const seen = p.limits_left() ? std::min(p.mean_k(), p.mean_q() + p.mask.left) : p.mean_k();
  double const once = seen * p.batch * p.heads_kv;
  double const again = std::max(blocks.strips * blocks.of_strip * span / together - once, 0.);
  double const rows = double(p.total_q) * p.heads_q;
  // As many bytes of Q and O are on their way.
  return (once + missed(m, 2 * heads * in_use * row) * again + rows) * row / m.memory;
}

double bytes_of_splits(Problem const& p, int splits) {
  return splits > 1 ? kSum * splits * double(p.total_q) * p.heads_q * (p.head_dim_v + 1) : 0;
}

// The splits of few rows are loaded at once, those of more rows four at a time, behind their LSE.
double merge_us(Problem const& p, Machine const& m, int splits) {
  bool const at_once = double(p.total_q) * p.heads_q <= 512 && splits <= 16;
  double const waits = at_once ? 1 : 1 + std::ceil(splits / 4.);
  return kLaunch * m.launch + waits * m.merge_wait +
         2 * bytes_of_splits(p, splits) / (m.memory * m.l2_gain);
}

// The choices that the kernel has, the simplest first.
class Candidates {
 public:
  // only: the tile, if it has been chosen.
  Candidates(Problem const& p, Machine const& m, ForwardKernel const& kernel,
             std::optional<ForwardTile> only)
      : p_(p), kernel_(kernel), only_(only), resident_(double(m.sm_count) * kernel.blocks_per_sm) {}

  // visit(ForwardChoice)
  template <class Visit>
  void each(Visit visit) const {
    for (ForwardTile const tile : {ForwardTile::First, ForwardTile::Second, ForwardTile::PackGqa}) {
      if (tile == only_.value_or(tile) && is_possible(p_, kernel_, tile)) {
        each_width(tile, visit);
      }
    }
    RowBlocks const first = row_blocks(p_, kernel_, ForwardTile::First, 1);
    bool const full = p_.alike() && first.strips * first.of_strip >= resident_;
    if (!only_ && !full && is_possible(p_, kernel_, ForwardTile::Split)) {
      each_split(visit);
    }
  }

 private:
  // Equal tiles: few heads side by side, which share keys. Unequal ones even out among many;
  // against a cache memory counts more. With one row block a head, or one wave, there is no order.
  // Beside decode, which reads memory all the time, tiles that read the same keys follow each
  // other.
  template <class Visit>
  void each_width(ForwardTile tile, Visit visit) const {
    RowBlocks const blocks = row_blocks(p_, kernel_, tile, 1);
    if (p_.beside_decode) {
      return visit(ForwardChoice{tile, 1, 1});
    }
    if (blocks.of_strip <= 1 || blocks.strips * blocks.of_strip <= resident_) {
      return visit(ForwardChoice{tile, 1, width_of(blocks, blocks.strips)});
    }
    double const usual = p_.unmasked() ? 0.25 : p_.used_k ? 1 : 8;
    int last = 0;
    for (double const waves : {usual, 4., 2., 1.}) {
      int const width = width_of(blocks, waves);
      if (width != last) {
        visit(ForwardChoice{tile, 1, width});
      }
      last = width;
    }
  }

  template <class Visit>
  void each_split(Visit visit) const {
    double const longest = row_blocks(p_, kernel_, ForwardTile::Split, 1).steps.longest;
    for (int const splits : {2, 4, 8, 16, 32}) {
      bool const allowed = p_.num_splits == 0 || splits <= p_.num_splits;
      if (allowed && splits <= longest && bytes_of_splits(p_, splits) <= kMostBytes) {
        RowBlocks const blocks = row_blocks(p_, kernel_, ForwardTile::Split, splits);
        double const waves = blocks.of_strip <= 1 ? blocks.strips : 1;
        visit(ForwardChoice{ForwardTile::Split, splits, width_of(blocks, waves)});
      }
    }
  }

  // About so many waves of tiles, in groups of heads that are alike and do not separate heads that
  // share keys.
  int width_of(RowBlocks const& blocks, double waves) const {
    double const heads = p_.varlen_q ? blocks.heads : blocks.strips;  // that an order distinguishes
    double const sharing = std::max(std::floor(blocks.heads / p_.heads_kv), 1.);
    int const of_keys = static_cast<int>(std::clamp(heads / sharing, 1., 1e9));
    double const width = waves * resident_ / blocks.of_strip / sharing;
    return static_cast<int>(sharing) *
           even_group(static_cast<int>(std::clamp(width, 1., double(of_keys))), of_keys);
  }

  Problem const& p_;
  ForwardKernel const& kernel_;
  std::optional<ForwardTile> only_;
  double resident_;
};

bool is_empty(Problem const& p) {
  return p.batch == 0 || p.total_q == 0 || p.heads_q == 0 || p.heads_kv == 0;
}

ForwardPlan best_of(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                    std::optional<ForwardTile> only) {
  ForwardPlan best{{ForwardTile::First, 1, 1}, std::numeric_limits<double>::infinity()};
  Candidates(p, m, kernel, only).each([&](ForwardChoice const& choice) {
    double const us = forward_us(p, m, kernel, choice);
    if (us < kSimpler * best.us) {
      best = {choice, us};
    }
  });
  return best;
}

}  // namespace

double forward_us(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                  ForwardChoice const& choice) {
  RowBlocks const blocks = row_blocks(p, kernel, choice.tile, choice.splits);
  double const resident = double(m.sm_count) * kernel.blocks_per_sm;
  double const us = overlapped(
      compute_us(p, blocks, times_of(m, kernel, choice.tile), choice.side_by_side, resident),
      memory_us(p, m, blocks, block_n_of(kernel, choice.tile), choice, resident));
  return kLaunch * m.launch + us + (choice.splits > 1 ? merge_us(p, m, choice.splits) : 0);
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

int forward_choices(Problem const& p, Machine const& m, ForwardKernel const& kernel,
                    ForwardChoice* choices) {
  int count = 0;
  if (!is_empty(p)) {
    Candidates(p, m, kernel, {}).each([&](ForwardChoice const& choice) {
      choices[count++] = choice;
    });
  }
  return count;
}

ForwardPlan plan_forward(Problem const& p, Machine const& m, ForwardKernel const& kernel) {
  if (is_empty(p)) {
    return {{ForwardTile::First, 1, 1}, 0};
  }
  if (!p.batch_invariant || p.varlen_q) {
    return best_of(p, m, kernel, {});
  }
  Problem alone = p;  // bits depend on the tile
  alone.batch = 1;
  alone.total_q = p.seqlen_q;
  alone.total_k = p.seqlen_k;
  return best_of(p, m, kernel, best_of(alone, m, kernel, {}).choice.tile);
}

}  // namespace flash::plan
