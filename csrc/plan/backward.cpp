#include "plan/backward.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/mask.h"
#include "core/row_range.h"
#include "core/work_tile.h"
#include "params/ordered_dq.h"

namespace flash::plan {
namespace {

constexpr double kElement = 2, kSum = 4;  // bytes of a number in Q and the like, and in fp32

// A varlen call's tile searches its sequence, µs.
constexpr double kSearch = 5.7;
// Waiting lengthens a step of ordered dQ by at most this part of it; by half of that if so many KV
// blocks see each row.
constexpr double kDrag = 0.39;
constexpr double kDragBlocks = 56;
// Tiles that add to dQ in turns take this part of a step longer.
constexpr double kTurns = 0.2;
// Of a head's tiles at work so many load a row from memory; the others find it in L2.
constexpr double kApart = 2.5;
// Neighbouring tiles of a head drift apart by this part of block_n, in rows, per query head: under
// a limit of the mask they do not have equally many steps.
constexpr double kDrift = 0.5;
// The last of ordered KV blocks rounds dQ, µs for each row block and column.
constexpr double kFinish = 0.027;
// The last of unequal tiles ends this part of the longest tile's time after an even end.
constexpr double kUneven = 0.57;
// The last group of heads begins this part of an average tile's time before the earlier groups end.
constexpr double kOverlap = 0.35;

constexpr int kRowSplitChoices[] = {2, 3, 4, 6, 8};
// A simpler choice, with less to add up, wins within this factor.
constexpr double kHysteresis = 1.01;

int ceil_div(int64_t n, int64_t d) { return static_cast<int>((n + d - 1) / d); }

// Two times that overlap take a little longer than the longer of them.
double overlapped(double a, double b) {
  double const a2 = a * a, b2 = b * b;
  return std::sqrt(std::sqrt(a2 * a2 + b2 * b2));
}

// The tiles, or KV blocks, of one query head.
struct HeadTiles {
  double count = 0;        // of all sequences
  double steps = 0;        // row blocks that see them, all in all
  double rows = 0;         // rows that see them, all in all
  double longest = 0;      // steps of the longest tile
  double in_sequence = 1;  // tiles of the longest sequence

  void add_sequences(Problem const& p, BackwardKernel const& k, double number, double rows_q,
                     double keys);
};

// Adds `number` sequences that are alike; a few tiles of one stand for all.
void HeadTiles::add_sequences(Problem const& p, BackwardKernel const& k, double number,
                              double rows_q, double keys) {
  constexpr int kMostLooks = 12;
  int const sq = std::max(static_cast<int>(rows_q + 0.5), 0);
  int const sk = std::max(static_cast<int>(keys + 0.5), 1);
  auto const clamped = [&](int width) { return std::min(width, 1 << 29); };
  Mask const limits{p.limits_left() ? clamped(p.mask.left) : -1,
                    p.limits_right() ? clamped(p.mask.right) : -1};
  SequenceMask const mask(limits, sq, sk);
  int const tiles = ceil_div(sk, k.block_n), looks = std::min(tiles, kMostLooks);
  double seen = 0;
  for (int i = 0; i < looks; ++i) {
    int const tile = looks == tiles ? i : static_cast<int>(int64_t(tiles - 1) * i / (looks - 1));
    int const blocks = row_range(mask, sq, tile * k.block_n, k.block_n, k.block_m).count();
    seen += blocks;
    longest = std::max(longest, double(blocks));
  }
  count += number * tiles;
  steps += number * tiles * seen / looks;
  rows = std::min(steps * k.block_m, count * std::max<double>(sq, rows));
  in_sequence = std::max<double>(in_sequence, tiles);
}

HeadTiles head_tiles(Problem const& p, BackwardKernel const& k) {
  HeadTiles tiles;
  int const batch = std::max(p.batch, 1);
  bool const packed = p.packed_q || p.packed_k;
  // The longest sequence of a varlen batch is known, and taken to be the only one that differs.
  if (packed && batch > 1 && !p.alike()) {
    double const q = std::min<double>(p.seqlen_q, double(p.total_q));
    double const keys = std::min<double>(p.seqlen_k, double(p.total_k));
    tiles.add_sequences(p, k, 1, q, keys);
    tiles.add_sequences(p, k, batch - 1, (double(p.total_q) - q) / (batch - 1),
                        (double(p.total_k) - keys) / (batch - 1));
  } else {
    tiles.add_sequences(p, k, batch, p.mean_q(), p.mean_k());
  }
  return tiles;
}

KernelTimes times_of(Machine const& m, BackwardKernel const& k, Schedule schedule) {
  if (k.hopper) {
    for (BackwardTimes const& t : m.backward) {
      if (t.head_dim == k.head_dim && t.head_dim_v == k.head_dim_v) {
        KernelTimes const times = schedule == Schedule::Tiles          ? t.tiles
                                  : schedule == Schedule::KvPersistent ? t.kv_persistent
                                                                       : t.ordered_dq;
        // Score mods take about a third more.
        return k.score_mods ? KernelTimes{times.begin, 1.3f * times.step} : times;
      }
    }
  }
  // A step has five products.
  double const flops = 2. * k.block_m * k.block_n * (3. * k.head_dim + 2. * k.head_dim_v);
  return {6.f, static_cast<float>(flops / m.mma_flops)};
}

// The numbers that all choices of a call share, and each choice's time.
class Prediction {
 public:
  Prediction(Problem const& p, Machine const& m, BackwardKernel const& k)
      : p_(p), m_(m), k_(k), tiles_(head_tiles(p, k)) {
    rows_q_ = double(p.total_q) * p.heads_q;
    rows_k_ = double(p.total_k) * p.heads_kv;
    read_ = kElement * (p.head_dim + p.head_dim_v);  // Q and dO
    sum_ = kSum * k.head_dim;                        // dQ
    adds_ = p.wants_dq && p.seqlen_k > k.block_n;
  }

  double us(BackwardChoice const& c) const {
    int const parts = ceil_div(p_.group(), c.heads);
    double const main =
        c.schedule == Schedule::KvPersistent ? persistent(c, parts) : by_tiles(c, parts);
    return m_.launch + before_and_behind(c, parts) + main;
  }

 private:
  // The time of a pass over so many bytes, from L2 if they are still there.
  double pass(double bytes) const {
    bool const in_l2 = bytes < 0.5 * double(m_.l2_bytes);
    return bytes / (m_.memory * (in_l2 ? m_.l2_gain : 1.f));
  }

  // The share of repeated accesses to so many bytes that L2 misses.
  double missed(double bytes) const {
    double const share = bytes / (m_.l2_share * double(m_.l2_bytes)), square = share * share;
    return square / (1 + square);
  }

  double key_sum_bytes(int parts) const {
    return rows_k_ * (k_.head_dim + k_.head_dim_v) * (parts > 1 ? kSum * parts : kElement);
  }

  // The launches beside the main one: D, zeros for dQ's sums, their rounding, and sums of dK and
  // dV.
  double before_and_behind(BackwardChoice const& c, int parts) const {
    double time = 0;
    if (c.schedule == Schedule::OrderedDq && ordered_dq_finds_delta(k_.head_dim)) {
      time += 0.5 * m_.launch;  // the main kernel computes most of D
    } else {
      time += m_.launch + pass(rows_q_ * read_);
      if (c.schedule == Schedule::Tiles && adds_) {
        time += m_.launch + pass(rows_q_ * sum_) + pass(rows_q_ * (sum_ + kElement * k_.head_dim));
      }
    }
    int const sums = parts * c.row_splits;
    if (sums > 1) {
      time += m_.launch + pass(key_sum_bytes(sums)) + pass(key_sum_bytes(1));
    }
    return time;
  }

  // The µs of a tile's begin and of a step.
  KernelTimes tile_times(Schedule schedule) const {
    KernelTimes times = times_of(m_, k_, schedule);
    if (p_.packed_k && schedule == Schedule::Tiles) {
      times.begin += static_cast<float>(kSearch);
    }
    if (schedule == Schedule::Tiles && p_.deterministic && adds_) {
      times.step *= static_cast<float>(1 + kTurns);
    }
    if (schedule == Schedule::OrderedDq) {
      double const blocks = blocks_that_see() / kDragBlocks, square = blocks * blocks;
      times.step *= static_cast<float>(1 + kDrag * square / (1 + square));
    }
    return times;
  }

  // Bytes of a row's Q, dO and dQ's sum, and the bytes of them that all tiles but the first access.
  double row_bytes() const { return read_ + (adds_ ? sum_ : 0); }
  double accessed_again() const {
    double const all = tiles_.rows * p_.heads_q;
    return std::max(0., all - rows_q_) * (read_ + (adds_ ? 2 * sum_ : 0));
  }

  double persistent(BackwardChoice const& c, int parts) const {
    KernelTimes const times = tile_times(c.schedule);
    double const heads_of_all = double(p_.heads_kv) * parts;
    double const items = std::max(p_.batch, 1) * heads_of_all;  // a sequence and GQA split each
    double const work =
        heads_of_all * tiles_.count * times.begin + p_.heads_q * tiles_.steps * times.step;
    double const item = work / items, waves = items / k_.resident;
    double const all_rows = std::min<double>(p_.seqlen_q, double(p_.total_q)) * c.heads;
    double time = std::ceil(waves) * item;
    if (!p_.alike()) {
      double const longest =
          tiles_.in_sequence * times.begin +
          tiles_.in_sequence * tiles_.longest * c.heads * times.step * (p_.full() ? 1. : 0.6);
      constexpr double kRounded = 1.45;
      time = std::max(longest, (waves + kRounded * (std::ceil(waves) - waves)) * item);
    }
    double const in_use = std::min<double>(items, k_.resident) * all_rows * row_bytes();
    double const bytes = rows_q_ * (read_ + kElement * k_.head_dim) + rows_k_ * read_ +
                         key_sum_bytes(parts) + accessed_again() * missed(in_use);
    return overlapped(time, bytes / m_.memory);
  }

  // The time of tiles that free CTAs draw one after the other.
  double by_tiles(BackwardChoice const& c, int parts) const {
    KernelTimes const times = tile_times(c.schedule);
    bool const packed = p_.packed_k && !p_.alike();
    double const of_sequence = double(p_.heads_kv) * parts;
    double const heads = p_.packed_k ? of_sequence : of_sequence * std::max(p_.batch, 1);
    double const together = std::min<double>(c.side_by_side, heads);
    double const count = of_sequence * tiles_.count * c.row_splits;
    // Tiles of one head that are at work at a time.
    double const at_work =
        std::min(std::max(k_.resident / together, 1.), tiles_.in_sequence * c.row_splits);
    double const longest =
        times.begin + std::ceil(tiles_.longest / c.row_splits) * c.heads * times.step;
    double const work = count * times.begin + p_.heads_q * tiles_.steps * times.step;
    double const even = work / k_.resident;
    double time = even;
    if (count <= k_.resident) {
      time = longest;
    } else if (p_.full() && !packed) {
      bool const alike = p_.group() % c.heads == 0;
      time = alike ? std::ceil(count / k_.resident) * longest : even + kUneven * longest;
    } else if (packed) {
      time = std::max(even, longest) + kUneven * longest * std::min(1., longest / even);
    } else {
      // The last heads' longest tiles come first.
      double const groups = std::ceil(heads / together);
      double const last = (heads - (groups - 1) * together) / heads;
      double const start = even * (1 - last) - kOverlap * work / count;
      time = std::max(even, std::max(start, 0.) + longest);
    }
    return overlapped(time, memory_us(c, parts, heads, together, at_work)) +
           (c.schedule == Schedule::OrderedDq ? finishing() : 0);
  }

  // The most KV blocks that see a row.
  double blocks_that_see() const {
    return std::min(tiles_.in_sequence, 1 + tiles_.longest * k_.block_m / k_.block_n);
  }

  // Without a limit of the mask, one KV block finishes dQ of all rows of a head, behind all others.
  double finishing() const { return p_.full() ? kFinish * tiles_.longest * k_.head_dim : 0; }

  // The time of memory meanwhile: all bytes come once, and those that L2 could not keep again.
  double memory_us(BackwardChoice const& c, int parts, double heads, double together,
                   double at_work) const {
    double const rows = std::min<double>(p_.seqlen_q, double(p_.total_q)) * c.heads;
    double const of_head = rows * row_bytes();
    double const heads_at_work =
        std::max(std::min<double>(together, k_.resident), std::min(heads, k_.resident / at_work));
    // Tiles of a head go through its rows together, except that they drift apart.
    double const apart = p_.full() ? 0 : kDrift * k_.block_n * at_work * c.heads;
    double const between = std::min(rows, apart + 4 * k_.block_m) * row_bytes();
    double const first = std::min(1., kApart / at_work) * missed(together * of_head);
    double const share = first + (1 - first) * missed(heads_at_work * between);
    double const sums = c.schedule == Schedule::OrderedDq ? 2 * kElement * k_.head_dim : 0;
    double const bytes = rows_q_ * (read_ + (adds_ ? 2 * sum_ : 0) + sums) + rows_k_ * read_ +
                         key_sum_bytes(parts) + accessed_again() * share;
    return bytes / m_.memory;
  }

  Problem const& p_;
  Machine const& m_;
  BackwardKernel const& k_;
  HeadTiles tiles_;
  double rows_q_;  // of all heads
  double rows_k_;
  double read_;
  double sum_;
  bool adds_;  // several tiles add to a row's dQ
};

// Bytes that sums of dK and dV may take: as many as those of dQ, or an amount that does not matter.
int64_t most_sum_bytes(Problem const& p, BackwardKernel const& k) {
  constexpr int64_t kLittle = 64 << 20;
  return std::max(int64_t(kSum) * p.total_q * p.heads_q * k.head_dim, kLittle);
}

bool fits_sums(Problem const& p, BackwardKernel const& k, int parts) {
  double const bytes = kSum * double(p.total_k) * p.heads_kv * (k.head_dim + k.head_dim_v);
  return parts == 1 || parts * bytes <= double(most_sum_bytes(p, k));
}

// Whether each resident CTA can have sums of dQ for the longest sequence.
bool fits_own_sums(Problem const& p, BackwardKernel const& k, int heads) {
  double const rows = double(std::min<int64_t>(p.seqlen_q, p.total_q)) * heads;
  return kSum * rows * k.head_dim * k.resident <= double(most_sum_bytes(p, k));
}

// The widest group of heads, up to `width`, that leaves no small rest.
int even_width(int64_t width, int64_t heads) {
  int64_t const groups = (heads + width - 1) / width;
  return static_cast<int>((heads + groups - 1) / groups);
}

class Choices {
 public:
  Choices(Problem const& p, BackwardKernel const& k, BackwardChoice* list)
      : p_(p), k_(k), tiles_(head_tiles(p, k)), list_(list) {
    bool const any = p.heads_q > 0 && p.total_k > 0 && p.total_q > 0;
    int const group = p.group();
    for (int heads = group; heads >= 1; --heads) {
      if (is_usual(group, heads) && fits_sums(p, k, ceil_div(group, heads))) {
        add_heads(heads, any);
      }
    }
  }

  int count() const { return count_; }

 private:
  // Whether the group's GQA splits are alike, or nearly so where a group has no divisor; a large
  // group has only a few of them.
  static bool is_usual(int group, int heads) {
    int const parts = ceil_div(group, heads);
    int const lacking = parts * heads - group;  // heads that the last split lacks
    bool const alike = lacking == 0 || (group < 8 ? lacking == 1 : 12 * lacking <= group);
    bool const few = group <= 8 || heads <= 4 || (parts & (parts - 1)) == 0;
    return alike && few;
  }

  void add(Schedule schedule, int heads, int row_splits, int64_t together) {
    int64_t const parts = ceil_div(p_.group(), heads);
    int64_t const all = int64_t(p_.heads_kv) * parts * (p_.packed_k ? 1 : std::max(p_.batch, 1));
    int64_t const width = std::clamp<int64_t>(together, 1, std::max<int64_t>(all, 1));
    BackwardChoice const choice{schedule, heads, row_splits,
                                even_width(width, std::max<int64_t>(all, 1))};
    if (count_ < kMostBackwardChoices && (count_ == 0 || !(list_[count_ - 1] == choice))) {
      list_[count_++] = choice;
    }
  }

  // Tiles of a head wait for each other. Each begins so many steps behind the one before, or it
  // would wait for it; then so many heads are side by side.
  void add_waiting(Schedule schedule, int heads) {
    constexpr double kLag = 1.3, kMaskedLag = 3.5, kBegin = 2.5;  // steps
    double const tile = tiles_.steps / std::max(tiles_.count, 1.) * heads + kBegin;
    double const side_by_side = (p_.full() ? kLag : kMaskedLag) * k_.resident / tile;
    int const least = std::clamp(static_cast<int>(side_by_side), std::max(k_.resident / 16, 1),
                                 std::max(3 * k_.resident / 4, 1));
    for (int const times : {1, 2, 4}) {
      if (times * least <= k_.resident) {
        add(schedule, heads, 1, times * least);
      }
    }
  }

  void add_heads(int heads, bool any) {
    bool const adds = p_.wants_dq && p_.seqlen_k > k_.block_n;
    bool const dense = !p_.packed_q && !p_.packed_k;
    bool const waits = p_.deterministic && adds;
    if (waits) {
      add_waiting(Schedule::Tiles, heads);
    } else if (p_.full() || !dense) {
      add(Schedule::Tiles, heads, 1, dense ? 2 : 4);
    } else {
      int together = 2;  // on the smallest GPUs as well
      do {
        add(Schedule::Tiles, heads, 1, together);
        together *= 2;
      } while (together <= k_.resident / 4);
    }
    if (!any || !k_.schedules) {
      return;
    }
    if ((adds || (p_.packed_k && p_.seqlen_k <= k_.block_n)) && fits_own_sums(p_, k_, heads)) {
      add(Schedule::KvPersistent, heads, 1, 1);
    }
    constexpr int kLeastRowBlocks = 3;  // with fewer, tiles do nothing but wait
    if (adds && dense && heads == 1 && ceil_div(p_.seqlen_q, k_.block_m) >= kLeastRowBlocks) {
      add_waiting(Schedule::OrderedDq, 1);
    }
    if (k_.cuts_rows && dense && !p_.deterministic && heads == p_.group()) {
      add_row_splits(heads);
    }
  }

  void add_row_splits(int heads) {
    int64_t const tiles =
        int64_t(std::max(p_.batch, 1)) * p_.heads_kv * ceil_div(p_.seqlen_k, k_.block_n);
    int64_t const slot = int64_t(kSum) * k_.block_n * (k_.head_dim + k_.head_dim_v);
    int64_t const most =
        std::min<int64_t>(ceil_div(p_.seqlen_q, k_.block_m),
                          most_sum_bytes(p_, k_) / slot / std::max<int64_t>(tiles, 1));
    for (int const parts : kRowSplitChoices) {
      if (parts <= most && tiles < 4 * k_.resident) {
        add(Schedule::Tiles, heads, parts, p_.full() ? 2 : 8);
      }
    }
  }

  Problem const& p_;
  BackwardKernel const& k_;
  HeadTiles tiles_;
  BackwardChoice* list_;
  int count_ = 0;
};

BackwardPlan least(Prediction const& prediction, std::span<BackwardChoice const> choices) {
  BackwardPlan best{};
  for (BackwardChoice const& choice : choices) {
    double const us = prediction.us(choice);
    if (best.us == 0 || kHysteresis * us < best.us) {
      best.second = best.choice;
      best.second_us = best.us;
      best.choice = choice;
      best.us = us;
    } else if (best.second_us == 0 || us < best.second_us) {
      best.second = choice;
      best.second_us = us;
    }
  }
  return best;
}

}  // namespace

double backward_us(Problem const& p, Machine const& m, BackwardKernel const& kernel,
                   BackwardChoice const& choice) {
  return Prediction(p, m, kernel).us(choice);
}

int backward_choices(Problem const& p, BackwardKernel const& kernel, BackwardChoice* choices) {
  return Choices(p, kernel, choices).count();
}

BackwardPlan plan_backward(Problem const& p, Machine const& m, BackwardKernel const& kernel) {
  std::array<BackwardChoice, kMostBackwardChoices> all;
  Problem usual = p;
  usual.wants_dq = usual.wants_dk = usual.wants_dv = true;
  std::span const choices(all.data(), backward_choices(usual, kernel, all.data()));
  BackwardPlan plan = least(Prediction(usual, m, kernel), choices);
  if (!p.wants_dq) {
    plan.choice.schedule = Schedule::Tiles;
    plan.us = backward_us(p, m, kernel, plan.choice);
    plan.second_us = 0;
  }
  return plan;
}

}  // namespace flash::plan
