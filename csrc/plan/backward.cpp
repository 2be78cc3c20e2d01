#include "plan/backward.h"

#include "core/tile_scheduler.h"
#include "params/ordered_dq.h"

namespace flash::plan {
namespace {

// Tiles that add to dQ in turn, by a semaphore, take this part of a step longer, and wait so many
// steps for each other tile of their head at work, where a limit of the mask makes them unequal.
constexpr double kSemaphore = 0.18, kWait = 0.8;
// KV blocks that wait for each other begin so many steps apart; a tile's begin is so many steps.
constexpr double kLag = 1.3, kBegin = 2.5;
// Tiles of a head that load a row of each part from memory; the others at work find it in L2.
constexpr double kApart = 3;
// Neighbouring tiles of a head drift apart by this part of block_n, in rows, per query head: under
// a limit of the mask they do not have equally many steps.
constexpr double kDrift = 0.5;
// A tile of a varlen batch, which finds its sequence first, takes so many times as long to begin.
constexpr float kVarlenBegin = 1.7f;
// Bytes of sums that do not matter. More may be as many as those of dQ.
constexpr double kLittle = 128 << 20;
// A step with score mods takes so many times as long.
constexpr float kScoreMods = 1.3f;

int ceil_div(int n, int d) { return (n + d - 1) / d; }

KernelTimes times_of(Machine const& m, BackwardKernel const& k, Schedule schedule) {
  auto const* measured = times_of(m.backward, k.head_dim, k.head_dim_v);
  if (k.hopper && measured) {
    auto const [begin, step] = measured[static_cast<int>(schedule)];
    return {begin, step * (k.score_mods ? kScoreMods : 1.f)};
  }
  // A step has five products.
  double const flops = 2. * k.block_m * k.block_n * (3. * k.head_dim + 2. * k.head_dim_v);
  return {6.f, static_cast<float>(flops / m.mma_flops)};
}

// A call's choices, and what they take. A tile is a KV block of a KV head's GQA split.
class Call {
 public:
  Call(Problem const& p, Machine const& m, BackwardKernel const& k)
      : p_(p), m_(m), k_(k), batch_(std::max(p.batch, 1)) {
    auto const steps = [&](double rows, double keys) {
      return steps_of({k.block_n, k.block_m, keys, rows, p.mask.right, p.mask.left}, true);
    };
    auto const tiles = [&](double keys) { return std::max(divide_up(keys, k.block_n), 1.); };
    double const most_q = std::min<double>(p.seqlen_q, double(p.total_q));
    double const most_k = std::min<double>(p.seqlen_k, double(p.total_k));
    tiles_ = tiles(p.mean_k());
    steps_ = tiles_ * steps(p.mean_q(), p.mean_k()).mean;
    most_tiles_ = tiles(most_k);
    longest_ = steps(most_q, most_k);
    dense_ = !p.varlen_q && !p.varlen_k;
    adds_ = p.wants_dq && p.seqlen_k > k.block_n;
    read_ = kElement * (p.head_dim + p.head_dim_v);
    rows_ = double(p.total_q) * p.heads_q;
    sums_ = kSum * rows_ * k.head_dim;
  }

  std::vector<BackwardPlan> choices() {
    int const group = p_.group();
    for (int heads = group; heads >= 1; --heads) {
      // GQA splits are alike, or nearly so; a large group has only a few of them.
      int const splits = ceil_div(group, heads), lacking = splits * heads - group;
      bool const few = group <= 8 || heads <= 4 || (splits & (splits - 1)) == 0;
      bool const alike = lacking <= group / (group < 8 ? 4 : 12);
      if (heads == group || (few && alike && fits(splits * key_bytes(kSum)))) {
        add_tiles(heads);
        if (k_.schedules && rows_ > 0 && p_.total_k > 0) {
          add_schedules(heads);
        }
      }
    }
    return choices_;
  }

  double us(BackwardChoice const& c) const {
    // Without a limit of the mask one ordered KV block, behind all others, reads dQ's sums of all
    // rows of a head, waits for them, and writes them rounded.
    bool const last = c.schedule == Schedule::OrderedDq && p_.unmasked();
    double const rounded = last ? longest_.longest * k_.block_m * k_.head_dim : 0;
    return m_.launch + beside_us(c) + overlapped(compute_us(c), bytes(c) / m_.memory) +
           2 * (kSum + kElement) * rounded / m_.sm_reads;
  }

 private:
  bool fits(double bytes) const { return bytes <= std::max(sums_, kLittle); }
  int gqa_splits(BackwardChoice const& c) const { return ceil_div(p_.group(), c.heads); }
  double key_bytes(double of_number) const {
    return of_number * double(p_.total_k) * p_.heads_kv * (k_.head_dim + k_.head_dim_v);
  }
  // KV heads' GQA splits, of all sequences and as an order of tiles distinguishes them.
  double items(int heads) const {
    return double(p_.heads_kv) * ceil_div(p_.group(), heads) * batch_;
  }
  double ordered(int heads) const { return items(heads) / (p_.varlen_k ? batch_ : 1); }
  bool waits(Schedule schedule) const {
    return schedule == Schedule::OrderedDq || (p_.deterministic && adds_);
  }

  // ---- which choices there are -----------------------------------------------------------------

  void add(Schedule schedule, int heads, int row_splits, double together) {
    int64_t const all = std::max<int64_t>(int64_t(ordered(heads)), 1);
    int const width = static_cast<int>(std::clamp<double>(together, 1, double(all)));
    BackwardChoice const choice{schedule, heads, row_splits, even_group(width, all)};
    if (choices_.empty() || choices_.back().choice != choice) {
      choices_.push_back({choice, us(choice)});
    }
  }

  void add_tiles(int heads) {
    if (waits(Schedule::Tiles)) {
      return add_widths(Schedule::Tiles, heads);
    }
    if (p_.unmasked() || !dense_) {
      return add(Schedule::Tiles, heads, 1, dense_ ? 2 : 4);
    }
    for (int together = 2; together <= std::max(k_.resident / 4, 2); together *= 2) {
      add(Schedule::Tiles, heads, 1, together);
    }
  }

  // Tiles of a head that wait for each other are not many at a time: they begin kLag steps apart
  // and, if they become shorter, as many more as that. Under a window they begin where nothing
  // waits.
  void add_widths(Schedule schedule, int heads) {
    double const tile = steps_ / tiles_ * heads + kBegin;
    double const lag = p_.window() ? 0 : kLag + (p_.unmasked() ? 0 : 2);
    int const least = std::clamp(static_cast<int>(lag * k_.resident / tile),
                                 std::max(k_.resident / 16, 1), std::max(3 * k_.resident / 4, 1));
    for (int const times : {4, 2, 1}) {
      if (times * least <= k_.resident) {
        add(schedule, heads, 1, times * least);
      }
    }
  }

  void add_schedules(int heads) {
    double const rows = double(std::min<int64_t>(p_.seqlen_q, p_.total_q)) * heads;
    double const own = kSum * rows * k_.head_dim * std::min<double>(k_.resident, items(heads));
    if ((adds_ || (p_.varlen_k && p_.seqlen_k <= k_.block_n)) && fits(own)) {
      add(Schedule::KvPersistent, heads, 1, 1);
    }
    if (adds_ && dense_ && heads == 1) {
      add_widths(Schedule::OrderedDq, heads);
    }
    double const tiles = double(batch_) * p_.heads_kv * most_tiles_;
    double const sum = kSum * k_.block_n * (k_.head_dim + k_.head_dim_v);
    bool const splits = k_.splits_rows && dense_ && !p_.deterministic && heads == p_.group();
    for (int const row_splits : {2, 4, 8}) {
      if (splits && tiles < k_.resident && row_splits <= ceil_div(p_.seqlen_q, k_.block_m) &&
          fits(row_splits * tiles * sum)) {
        add(Schedule::Tiles, heads, row_splits, p_.unmasked() ? 2 : 8);
      }
    }
  }

  // ---- what they take --------------------------------------------------------------------------

  // The launches beside the main one: D, zeros for dQ's sums, their rounding, sums of dK and dV.
  double beside_us(BackwardChoice const& c) const {
    int const splits = gqa_splits(c) * c.row_splits;
    double const sums =
        splits > 1 ? m_.launch + key_bytes(splits * kSum + kElement) / m_.memory : 0;
    if (c.schedule == Schedule::OrderedDq && ordered_dq_finds_delta(k_.head_dim)) {
      return sums + 0.5 * m_.launch;  // the main kernel computes most of D
    }
    bool const rounds = c.schedule == Schedule::Tiles && adds_;
    double const bytes = rows_ * read_ + (rounds ? (2 + kElement / kSum) * sums_ : 0);
    return sums + (rounds ? 2 : 1) * m_.launch + bytes / m_.memory;
  }

  // Heads that an order of tiles keeps together, and the tiles of one that are at work at a time.
  double together(BackwardChoice const& c) const {
    return std::min<double>(c.side_by_side, ordered(c.heads));
  }
  double at_work(BackwardChoice const& c) const {
    return std::min(std::max(k_.resident / together(c), 1.), tiles_ * c.row_splits);
  }

  // Free CTAs draw one tile after the other; the last group of heads begins with its longest. Or
  // they draw all tiles of a sequence, and the longest sequence comes first.
  double compute_us(BackwardChoice const& c) const {
    auto const [plain_begin, plain_step] = times_of(m_, k_, c.schedule);
    double const resident = k_.resident, all = items(c.heads);
    if (c.schedule == Schedule::KvPersistent) {
      return queue_us({all, resident,
                       tiles_ * plain_begin + steps_ * p_.group() / gqa_splits(c) * plain_step,
                       most_tiles_ * (plain_begin + longest_.mean * c.heads * plain_step), all});
    }
    bool const in_turn = c.schedule == Schedule::Tiles && waits(c.schedule);
    double const step = plain_step * (in_turn ? 1 + kSemaphore : 1);
    double const others = p_.deterministic && waits(c.schedule) ? at_work(c) - 1 : 0;
    double const begin = plain_begin * (p_.varlen_k ? kVarlenBegin : 1);
    double const fixed = begin + kWait * unequal() * others * step;
    double const mean = fixed + steps_ / tiles_ * p_.group() / gqa_splits(c) / c.row_splits * step;
    double const longest = fixed + std::ceil(longest_.longest / c.row_splits) * c.heads * step;
    bool const any = p_.varlen_k && !p_.alike();
    double const last = any ? 1 : last_group(ordered(c.heads), together(c));
    return queue_us(
        {all * tiles_ * c.row_splits, resident, mean, longest, last * most_tiles_ * c.row_splits});
  }

  // Whether neighbouring tiles of a head differ in length.
  double unequal() const { return p_.unmasked() ? 0 : 1; }

  // All bytes come from memory once, and those that L2 could not keep again.
  double bytes(BackwardChoice const& c) const {
    double const dq = adds_ ? kSum * k_.head_dim : 0, of_row = read_ + dq;  // Q, dO, dQ's sum
    double const seen = steps_ * batch_ * k_.block_m * p_.heads_q;
    double const touched = std::min(rows_, seen), again = (seen - touched) * (read_ + 2 * dq);
    double const once = touched * read_ + double(p_.total_k) * p_.heads_kv * read_ +
                        key_bytes(gqa_splits(c) > 1 ? kSum * gqa_splits(c) : kElement);
    double const rows = p_.mean_q() * c.heads, written = rows_ * kElement * k_.head_dim;
    if (c.schedule == Schedule::KvPersistent) {
      double const running = std::min<double>(items(c.heads), k_.resident);
      return once + written + again * missed(m_, running * p_.seqlen_q * c.heads * of_row);
    }
    double const tiles = at_work(c);
    double const heads = std::max(std::min<double>(together(c), k_.resident),
                                  std::min(items(c.heads), k_.resident / tiles));
    // Tiles of a head go through its rows together, except that they drift apart.
    double const drift = unequal() * kDrift * k_.block_n * tiles * c.heads;
    double const between = std::min(rows, drift + k_.block_m);
    double const first =
        std::min(1., kApart * c.row_splits / tiles) * missed(m_, together(c) * rows * of_row);
    return once + touched * 2 * dq + (c.schedule == Schedule::OrderedDq ? 2 * written : 0) +
           again * (first + (1 - first) * missed(m_, heads * between * of_row));
  }

  Problem const& p_;
  Machine const& m_;
  BackwardKernel const& k_;
  int batch_;
  double tiles_;       // of a query head, in an average sequence
  double steps_;       // of them all
  double most_tiles_;  // in the longest sequence
  Steps longest_;      // of such a tile
  bool dense_;
  bool adds_;    // several tiles add to a row's dQ
  double read_;  // bytes of a row of Q and dO
  double rows_;  // of all heads
  double sums_;  // bytes of dQ's sums
  std::vector<BackwardPlan> choices_;
};

}  // namespace

std::vector<BackwardPlan> backward_choices(Problem const& p, Machine const& m,
                                           BackwardKernel const& kernel) {
  return Call(p, m, kernel).choices();
}

BackwardPlan plan_backward(Problem const& p, Machine const& m, BackwardKernel const& kernel) {
  Problem usual = p;
  usual.wants_dq = true;
  BackwardPlan plan = best_of(backward_choices(usual, m, kernel));
  if (!p.wants_dq) {
    plan.choice.schedule = Schedule::Tiles;
    plan.us = Call(p, m, kernel).us(plan.choice);
  }
  return plan;
}

}  // namespace flash::plan
