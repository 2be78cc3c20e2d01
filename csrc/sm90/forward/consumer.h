// A computing warpgroup: 64 query rows against the keys that go by.
#pragma once

#include "core/score_hooks.h"
#include "sm90/forward/args.h"
#include "sm90/forward/shared_storage.h"
#include "sm90/forward/store.h"

namespace flash::sm90 {

// Warpgroups take turns at starting products, so that one's softmax runs under another's products
// and not all of them want the same unit at once.
template <class Config>
struct Turns {
  int warpgroup;

  // Before the first turn: the first warpgroup has it.
  __device__ void begin() const {
    if (warpgroup == Config::kConsumers - 1) {
      pass();
    }
  }
  __device__ void wait() const { cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, warpgroup); }
  __device__ void pass() const {
    int const next = warpgroup + 1 < Config::kConsumers ? warpgroup + 1 : 0;
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, next);
  }
  // After the last: no barrier is left half full.
  __device__ void end() const {
    if (warpgroup == 0) {
      wait();
    }
  }
};

template <class Config>
struct Consumer {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  using Acc = Accumulators<Config>;
  using MmaScores = typename Config::MmaScores;
  using MmaValues = typename Config::MmaValues;
  using ScoreShape = Shape<Int<kWarpgroupRows>, Int<Config::kBlockN>>;
  using ScoreFragment = decltype(partition_fragment_C(MmaScores{}, ScoreShape{}));
  using Offsets =
      std::conditional_t<Config::kScores == ScoreLevel::Plain, NoOffsets, RowOffsets<Acc::kRows>>;
  // P in registers, the A operand of P·V
  using Probabilities =
      decltype(make_tensor<Element>(as_operand_a(typename ScoreFragment::layout_type{})));

  ForwardArgs const& args;
  SharedStorage<Config>& smem;
  int warpgroup;          // of those that compute
  int thread;             // of the warpgroup
  uint32_t number = 0;    // row blocks so far
  uint32_t blocks = 0;    // key blocks so far
  DropoutMask dropout{};  // of this row block

  __device__ __forceinline__ void run() {
    Turns<Config> const turns{warpgroup};
    turns.begin();
    for (;; ++number) {
      smem.q_ring.wait_full(RingPosition<1>(number));
      RowBlock<Config> const& block = smem.row_block(number);
      if (!block.tile.valid) {
        break;
      }
      Acc acc(Config::kScores == ScoreLevel::Plain ? args.params.scores.softmax_scale
                                                   : block.score_mod.exponent_scale());
      attend(block, turns, acc);
      store<Config>(args.params, block, warpgroup, thread, acc);
    }
    turns.end();
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;  // lanes

  __device__ int first_row() const { return warpgroup * kWarpgroupRows; }

  __device__ __forceinline__ void attend(RowBlock<Config> const& block, Turns<Config> const& turns,
                                         Acc& acc) {
    int const steps = block.range.count(), masked_steps = block.range.masked_count();
    int const unseen = unseen_steps(block);
    if constexpr (Config::kScores == ScoreLevel::Full) {
      if (args.params.scores.dropout_p > 0.f) {
        WorkTile const& tile = block.tile;
        dropout = DropoutMask(args.params.scores, tile.batch, args.params.heads_q, tile.head);
      }
    }
#pragma unroll 1
    for (int step = 0; step < unseen; ++step) {
      leave_out(step, turns);
    }
    if (unseen < steps) {
      Probabilities p;
      int step = unseen;
      if (step < masked_steps) {
        first_step<true>(block, step, steps, turns, acc, p);
      } else {
        first_step<false>(block, step, steps, turns, acc, p);
      }
      for (++step; step < masked_steps; ++step) {
        next_step<true>(block, step, steps, turns, acc, p);
      }
      for (; step < steps; ++step) {
        next_step<false>(block, step, steps, turns, acc, p);
      }
      last_values(steps - 1, acc, p);
    } else {
      smem.q_ring.release(RingPosition<1>(number));
    }
    blocks += steps;
  }

  // Key blocks come from the right, so those that none of this warpgroup's rows sees come first.
  __device__ int unseen_steps(RowBlock<Config> const& block) const {
    int const rows = min(block.rows, first_row() + kWarpgroupRows);
    return rows > first_row()
               ? block.range.steps_right_of(block.mask, block.row_begin + rows, Config::kBlockN)
               : block.range.count();
  }

  __device__ void leave_out(int step, Turns<Config> const& turns) {
    Position const here(blocks + step);
    turns.wait();
    turns.pass();
    smem.k_ring.wait_full(here);
    smem.k_ring.release(here);
    smem.v_ring.wait_full(here);
    smem.v_ring.release(here);
  }

  // The last block of keys frees Q as well.
  __device__ void release_k(int step, int steps) {
    smem.k_ring.release(Position(blocks + step));
    if (step + 1 == steps) {
      smem.q_ring.release(RingPosition<1>(number));
    }
  }

  // S = Q·Kᵀ, not waited for
  __device__ void start_scores(Position at, ScoreFragment& s) {
    auto const slice = MmaScores{}.get_slice(0);
    Tensor q = make_tensor(make_smem_ptr(smem.q), typename Config::SmemLayoutQ{});
    Tensor k = make_tensor(make_smem_ptr(smem.k[0]), typename Config::SmemLayoutK{});
    start_product<false>(MmaScores{}, slice.partition_fragment_A(q(_, _, warpgroup)),
                         slice.partition_fragment_B(k)(_, _, _, at.stage), s);
  }

  // O += P·V, not waited for
  __device__ void start_values(Position at, Probabilities const& p, Acc& acc) {
    auto const slice = MmaValues{}.get_slice(0);
    Tensor v = make_tensor(make_smem_ptr(smem.v[0]), typename Config::SmemLayoutV{});
    start_product<true>(MmaValues{}, p, slice.partition_fragment_B(v)(_, _, _, at.stage), acc.out);
  }

  // Whether ALiBi is all that happens to these scores, with no key in sight right of the diagonal.
  __device__ static bool bias_is_linear(RowBlock<Config> const& block, int row_begin,
                                        int key_begin) {
    ScoreMod const& mod = block.score_mod;
    bool const left =
        block.mask.right <= mod.shift || key_begin + Config::kBlockN <= row_begin + mod.shift;
    return mod.alibi_slope != 0.f && mod.folds_scale() && left;
  }

  // Scores become probabilities. Returns whether O has to be multiplied by `rescale` before it
  // takes more, the same in a warp.
  template <bool kMasked, bool kFirst>
  __device__ __forceinline__ bool softmax(RowBlock<Config> const& block, int step,
                                          ScoreFragment& fragment, Acc& acc,
                                          float (&rescale)[Acc::kRows]) {
    Tensor s = make_tensor(fragment.data(), rows_and_columns(fragment.layout()));
    FragmentCoord<4> const coord(thread);
    int const row_begin = block.row_begin + first_row();
    int const key_begin = block.range.block_at(step) * Config::kBlockN;
    Offsets offsets{};
    if constexpr (Config::kScores == ScoreLevel::Full) {
      if (bias_is_linear(block, row_begin, key_begin)) {
        apply_left_bias(s, block.score_mod, row_begin, key_begin, coord, offsets);
      } else {
        apply_score_mod(s, block.score_mod, row_begin, key_begin, coord);
      }
    }
    if constexpr (kMasked) {
      apply_mask(s, block.mask, row_begin, key_begin, coord);
    }
    bool moved = false;
    if (kFirst || __any_sync(kAll, acc.softmax.template may_move<size<1>(s)>(s, offsets))) {
      moved = __any_sync(kAll,
                         acc.softmax.template raise<size<1>(s)>(s, rescale, QuadReduce{}, offsets));
      if (moved) {
        acc.softmax.rescale(rescale);
      }
    }
    acc.softmax.template exponentials<size<1>(s)>(s, offsets);
    if constexpr (Config::kScores == ScoreLevel::Full) {
      acc.softmax.keep_sums_here();
      if (args.params.scores.dropout_p > 0.f) {
        apply_dropout(s, dropout, row_begin, key_begin, coord);
      }
    }
    return moved;
  }

  __device__ static void to_operand(ScoreFragment const& s, Probabilities& p) {
    Tensor words = recast<uint32_t>(p);
    pack<Element>(s, words);
  }

  template <bool kMasked>
  __device__ __forceinline__ void first_step(RowBlock<Config> const& block, int step, int steps,
                                             Turns<Config> const& turns, Acc& acc,
                                             Probabilities& p) {
    Position const here(blocks + step);
    ScoreFragment s;
    smem.k_ring.wait_full(here);
    turns.wait();
    start_scores(here, s);
    turns.pass();
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    release_k(step, steps);
    float rescale[Acc::kRows];
    softmax<kMasked, true>(block, step, s, acc, rescale);
    to_operand(s, p);
    smem.v_ring.wait_full(here);
  }

  // Q·Kᵀ of this block, then P·V of the one before; the softmax of this one runs under the latter.
  template <bool kMasked>
  __device__ __forceinline__ void next_step(RowBlock<Config> const& block, int step, int steps,
                                            Turns<Config> const& turns, Acc& acc,
                                            Probabilities& p) {
    Position const here(blocks + step), before(blocks + step - 1);
    ScoreFragment s;
    smem.k_ring.wait_full(here);
    turns.wait();
    start_scores(here, s);
    start_values(before, p, acc);
    turns.pass();
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    release_k(step, steps);
    float rescale[Acc::kRows];
    bool const moved = softmax<kMasked, false>(block, step, s, acc, rescale);
    // Left alone, the compiler takes the wait for P·V before the exponentials that are to run under
    // it. It keeps the two waits in order, and does not know that sums are never negative.
    bool const never = acc.softmax.sum[0] + acc.softmax.sum[1] < 0.f;
    smem.v_ring.wait_full(never ? before : here);
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc.out);
    smem.v_ring.release(before);
    // Rarely: see OnlineSoftmax. It is a tenth of all instructions here.
    if (moved) {
      acc.rescale(rescale);
    }
    to_operand(s, p);
  }

  __device__ void last_values(int step, Acc& acc, Probabilities const& p) {
    Position const at(blocks + step);
    start_values(at, p, acc);
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc.out);
    smem.v_ring.release(at);
  }
};

}  // namespace flash::sm90
