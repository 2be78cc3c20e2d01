#include "params/bwd_params.h"
#include "plan/cost.h"

namespace flash::plan {
namespace {

// Tiles that add to dQ in order, by a semaphore, take this part of a step longer.
constexpr double kSemaphore = 0.18;
// KV blocks that wait for each other begin so many steps apart; a tile's fixed time is so many
// steps.
constexpr double kLag = 1.3, kFixed = 2.5;
// Tiles of a head that load a row of each part from memory; the others at work find it in L2.
constexpr double kApart = 3;
// Neighbouring tiles of a head drift apart by this part of block_n, in rows, per query head: under
// a limit of the mask they do not have equally many steps.
constexpr double kDrift = 0.5;
// A tile of a varlen batch, which finds its sequence first, takes so many times as long to begin.
constexpr float kVarlenFixed = 1.7f;
// Sums of up to so many bytes are always allowed; larger ones, if they are no more than dQ's sums.
constexpr double kLittle = 128 << 20;
// A step with score mods takes so many times as long.
constexpr float kScoreMods = 1.3f;

KernelTimes times_of(Machine const& m, Kernel const& k, Schedule schedule) {
  // A step has five products.
  double const flops = 2. * k.block_m * k.block_n * (3. * k.head_dim + 2. * k.head_dim_v);
  KernelTimes const counted{6.f, counted_step(m, k, flops)};
  bool const hopper = k.sm == 90;
  auto const [fixed, step] = times_of(hopper ? m.backward : std::span<RowTimes const>{}, k,
                                      static_cast<int>(schedule), counted);
  return {fixed, step * (hopper && !k.plain ? kScoreMods : 1.f)};
}

// The tiles of a choice, and what they take: KV blocks of GQA splits of KV heads.
struct BackwardCost {
  Problem const& p;
  Machine const& m;
  Kernel const& k;
  BackwardChoice c;

  // The call. Sequences other than the longest are taken to be alike.
  int batch = std::max(p.batch, 1);
  double most_q = std::min<double>(p.seqlen_q, double(p.total_q));  // of the longest sequence
  double most_k = std::min<double>(p.seqlen_k, double(p.total_k));
  double most_tiles = tiles_of(most_k);                                           // of a query head
  Steps longest = steps_of(most_q, most_k);                                       // of such a tile
  double other_q = other(p.total_q, most_q), other_k = other(p.total_k, most_k);  // of the others
  // An average sequence: tiles of a head, and the steps of them all.
  double of_head = averaged(most_tiles, tiles_of(other_k));
  double steps =
      averaged(most_tiles * longest.mean, tiles_of(other_k) * steps_of(other_q, other_k).mean);
  bool dense = !p.varlen_q && !p.varlen_k;
  bool adds = p.wants_dq && p.seqlen_k > k.block_n;  // several tiles add to a row's dQ
  double unequal = p.unmasked() ? 0 : 1;             // whether neighbouring tiles of a head are
  bool in_order = p.deterministic && adds && c.schedule != Schedule::KvPersistent;
  bool waits = in_order || c.schedule == Schedule::OrderedDq;
  double read = kElement * (p.head_dim + p.head_dim_v);  // bytes of a row of Q and dO
  double rows = double(p.total_q) * p.heads_q;
  double sums = kSum * rows * k.head_dim;  // bytes of dQ's sums

  // The choice
  int splits = static_cast<int>(divide_up(p.group(), c.heads));  // GQA splits of a KV head
  double items = double(p.heads_kv) * splits * batch;            // GQA splits of the call
  double ordered = items / (p.varlen_k ? batch : 1);  // that an order of tiles distinguishes
  double together = std::min<double>(c.side_by_side, ordered);      // whose tiles run together
  double of_item = of_head * c.row_splits;                          // tiles of one
  double at_work = std::clamp(k.resident / together, 1., of_item);  // of these, at a time

  double other(int64_t total, double most) const {
    return std::max(double(total) - most, 0.) / std::max(batch - 1, 1);
  }
  double averaged(double of_longest, double of_other) const {
    return (of_longest + (batch - 1) * of_other) / batch;
  }
  double tiles_of(double keys) const { return std::max(divide_up(keys, k.block_n), 1.); }
  Steps steps_of(double rows, double keys) const {
    return plan::steps_of(k.block_n, k.block_m, keys, rows, p.mask.right, p.mask.left, true);
  }
  bool fits(double bytes) const { return bytes <= std::max(sums, kLittle); }
  double key_bytes(double of_number) const {
    return of_number * double(p.total_k) * p.heads_kv * (k.head_dim + k.head_dim_v);
  }

  // The orders of tiles that are worth a prediction: heads side by side. Tiles of a head that wait
  // for each other are not many at a time: they begin kLag steps apart and, if they become shorter,
  // as many more as that. Under a window they begin where nothing waits.
  std::vector<int> widths() const {
    bool const one = c.schedule == Schedule::KvPersistent;
    int least = one ? 1 : dense ? 2 : 4;
    int most = !one && dense && !p.unmasked() ? std::max(k.resident / 4, 2) : least;
    if (waits) {
      double const lag = p.window() ? 0 : kLag + (p.unmasked() ? 0 : 2);
      least = std::clamp(static_cast<int>(lag * k.resident / (steps / of_head * c.heads + kFixed)),
                         std::max(k.resident / 16, 1), std::max(3 * k.resident / 4, 1));
      most = std::min(4 * least, k.resident);
    }
    std::vector<int> widths;
    for (int width = least; width <= most; width *= 2) {
      widths.push_back(width);
    }
    if (waits) {
      std::ranges::reverse(widths);
    }
    return widths;
  }

  double us() const {
    // Without a limit of the mask one ordered KV block, after all others, reads dQ's sums of all
    // rows of a head, waits for them, and writes them rounded.
    bool const last = c.schedule == Schedule::OrderedDq && p.unmasked();
    double const rounded = last ? longest.longest * k.block_m * k.head_dim : 0;
    return m.launch + other_launches_us() + overlapped(compute_us(), bytes() / m.memory) +
           2.5 * (kSum + kElement) * rounded / m.sm_reads;
  }

 private:
  // The other launches than the main one: D, zeros for dQ's sums, their rounding, sums of dK and
  // dV.
  double other_launches_us() const {
    int const parts = splits * c.row_splits;
    double const merge = parts > 1 ? m.launch + key_bytes(parts * kSum + kElement) / m.memory : 0;
    if (c.schedule == Schedule::OrderedDq && computes_delta(p, k.head_dim)) {
      return merge + 0.5 * m.launch;  // the main kernel computes most of D
    }
    bool const rounds = c.schedule == Schedule::Tiles && adds;
    double const bytes = rows * read + (rounds ? (2 + kElement / kSum) * sums : 0);
    return merge + (rounds ? 2 : 1) * m.launch + bytes / m.memory;
  }

  // Free CTAs draw one tile after the other; the last round of heads begins with its longest. Or
  // they draw all tiles of a sequence, and the longest sequence comes first.
  double compute_us() const {
    auto const [plain_fixed, plain_step] = times_of(m, k, c.schedule);
    double const resident = k.resident, of_split = steps * p.group() / splits;
    if (c.schedule == Schedule::KvPersistent) {
      return queue_us(items, resident, of_head * plain_fixed + of_split * plain_step,
                      most_tiles * (plain_fixed + longest.mean * c.heads * plain_step), items);
    }
    bool const waits_in_order = c.schedule == Schedule::Tiles && in_order;
    double const step = plain_step * (waits_in_order ? 1 + kSemaphore : 1);
    double const fixed = plain_fixed * (p.varlen_k ? kVarlenFixed : 1);
    bool const any = p.varlen_k && !p.alike();
    return queue_us(items * of_item, resident, fixed + of_split / of_item * step,
                    fixed + std::ceil(longest.longest / c.row_splits) * c.heads * step,
                    (any ? 1 : last_round(ordered, together)) * most_tiles * c.row_splits);
  }

  // All bytes come from memory once, and those that L2 could not keep again.
  double bytes() const {
    double const dq = adds ? kSum * k.head_dim : 0, of_row = read + dq;  // Q, dO, dQ's sum
    double const seen = steps * batch * k.block_m * p.heads_q;
    double const touched = std::min(rows, seen), again = (seen - touched) * (read + 2 * dq);
    double const once = touched * read + double(p.total_k) * p.heads_kv * read +
                        key_bytes(splits > 1 ? kSum * splits : kElement);
    double const of_heads = p.mean_q() * c.heads, written = rows * kElement * k.head_dim;
    if (c.schedule == Schedule::KvPersistent) {
      double const running = std::min<double>(items, k.resident);
      return once + written + again * missed(m, running * p.seqlen_q * c.heads * of_row);
    }
    double const heads = std::min(items, k.resident / at_work);
    // Tiles of a head go through its rows together, except that they drift apart.
    double const drift = unequal * kDrift * k.block_n * at_work * c.heads;
    double const between = std::min(of_heads, drift + k.block_m);
    double const first =
        std::min(1., kApart * c.row_splits / at_work) * missed(m, together * of_heads * of_row);
    return once + touched * 2 * dq + (c.schedule == Schedule::OrderedDq ? 2 * written : 0) +
           again * (first + (1 - first) * missed(m, heads * between * of_row));
  }
};

std::vector<BackwardChoice> candidates(Problem const& p, Machine const& m, Kernel const& k) {
  std::vector<BackwardChoice> all;
  auto const add = [&](Schedule schedule, int heads, int row_splits) {
    BackwardCost const blocks{p, m, k, {schedule, heads, row_splits, 1}};
    for (int const width : blocks.widths()) {
      all.push_back({schedule, heads, row_splits, even_width(width, blocks.ordered)});
    }
  };
  int const group = p.group();
  for (int heads = group; heads >= 1; --heads) {
    BackwardCost const t{p, m, k, {Schedule::Tiles, heads, 1, 1}};
    // GQA splits are alike, or nearly so; a large group has only a few of them.
    int const lacking = t.splits * heads - group;
    bool const few = group <= 8 || heads <= 4 || (t.splits & (t.splits - 1)) == 0;
    bool const alike = lacking <= group / (group < 8 ? 4 : 12), whole = heads == group;
    if (!whole && !(few && alike && t.fits(t.splits * t.key_bytes(kSum)))) {
      continue;
    }
    add(Schedule::Tiles, heads, 1);
    if (k.sm != 90 || !k.plain || t.rows == 0 || p.total_k == 0) {
      continue;
    }
    double const of_cta = kSum * t.most_q * heads * k.head_dim;
    if ((t.adds || (p.varlen_k && p.seqlen_k <= k.block_n)) &&
        t.fits(of_cta * std::min<double>(k.resident, t.items))) {
      add(Schedule::KvPersistent, heads, 1);
    }
    if (t.adds && t.dense && heads == 1) {
      add(Schedule::OrderedDq, heads, 1);
    }
    double const tiles = t.most_tiles * p.heads_kv * t.batch;
    double const of_tile = kSum * k.block_n * (k.head_dim + k.head_dim_v);
    bool const splits_rows = has_row_split(k.head_dim, k.head_dim_v, k.plain) && t.dense &&
                             !p.deterministic && whole && tiles < k.resident;
    for (int const parts : {2, 4, 8}) {
      if (splits_rows && parts <= divide_up(p.seqlen_q, k.block_m) &&
          t.fits(parts * tiles * of_tile)) {
        add(Schedule::Tiles, heads, parts);
      }
    }
  }
  return all;
}

// KV blocks that a row sees, on average.
double blocks_that_see(Problem const& p, int block_n) {
  double const rows = std::max(p.seqlen_q, 1), keys = p.seqlen_k, blocks = divide_up(keys, block_n);
  if (p.window()) {
    return std::min(blocks, (double(p.mask.left) + p.mask.right) / block_n + 1);
  }
  double const seen = rows <= keys ? keys - rows / 2 : keys * keys / (2 * rows);
  return p.unmasked() ? blocks : std::min(blocks, seen / block_n + 0.5);
}

}  // namespace

bool computes_delta(Problem const& p, int head_dim) {
  return ordered_dq_computes_delta(head_dim) && p.all_rows_see_keys();
}

int heads_computed_before(Problem const& p, Kernel const& k, int side_by_side) {
  // Row blocks whose D the delta warp computes while the other warps do a step: fitted to the best
  // numbers of heads computed before, at 512 and 1k keys on an H200.
  double const in_step = k.cluster > 1 ? 0.4 : k.head_dim == 96 ? 0.3 : 0.17;
  int const heads = p.heads_q * p.batch;
  auto const before = static_cast<int>((1 - in_step * blocks_that_see(p, k.block_n)) * heads);
  return std::clamp(before, std::min(side_by_side, heads), heads);
}

std::vector<BackwardPlan> backward_choices(Problem const& p, Machine const& m, Kernel const& k) {
  return predicted<BackwardCost>(candidates(p, m, k), {{p, 1}}, m, k);
}

BackwardPlan plan_backward(Problem const& p, Machine const& m, Kernel const& k) {
  Problem usual = p;
  usual.wants_dq = true;
  BackwardPlan plan = best_of(backward_choices(usual, m, k));
  if (!p.wants_dq) {
    plan.choice.schedule = Schedule::Tiles;
    plan.us = BackwardCost{p, m, k, plan.choice}.us();
  }
  return plan;
}

}  // namespace flash::plan
