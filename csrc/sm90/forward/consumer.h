// A consumer warpgroup: 64 query rows against the keys that they see.
#pragma once

#include "sm90/forward/ping_pong.h"
#include "sm90/forward/score_mods.h"
#include "sm90/forward/store.h"
#include "sm90/forward/store_tile.h"
#include "sm90/operand.h"

namespace flash::sm90::forward {

template <class Config>
struct Consumer {
  using Element = typename Config::Element;
  using ValueElement = typename Config::ValueElement;
  using Position = RingPosition<Config::kStages>;
  using Acc = Accumulators<Config>;
  using MmaScores = typename Config::MmaScores;
  using MmaValues = typename Config::MmaValues;
  using ScoreShape = Shape<Int<kWarpgroupRows>, Int<Config::kBlockN>>;
  using ScoreFragment = decltype(partition_fragment_C(MmaScores{}, ScoreShape{}));
  static constexpr int kColumns = Config::kBlockN / 4;  // of scores, a thread
  // Whether a step takes its rows one after the other, so that waits are over between them.
  template <class ScoreMods>
  static constexpr bool kRowByRow = Config::kWaitsBetweenRows && !ScoreMods::kAny;
  // Whether rows are finished under the last product. With score mods they are finished after it,
  // or the code would be there once for each kind of mod; with pack-GQA it takes more registers.
  static constexpr bool kFinishesEarly = Config::kScores == ScoreLevel::Plain && !Config::kPackGqa;
  // P in registers, the A operand of P·V
  using Probabilities =
      decltype(make_tensor<ValueElement>(as_operand_a(typename ScoreFragment::layout_type{})));

  ForwardArgs const& args;
  SharedStorage<Config>& smem;
  int warpgroup = 0;    // among the consumers
  int thread = 0;       // of the warpgroup
  uint32_t blocks = 0;  // KV blocks so far

  __device__ __forceinline__ void run() {
    if constexpr (Config::kStoresLate) {
      run_storing_late();
    } else {
      run_storing_at_once();
    }
  }

 protected:
  static constexpr unsigned kAll = 0xffffffffu;  // lanes

  __device__ __forceinline__ void run_storing_at_once() {
    set_thread_and_warpgroup();
    ping_pong().begin();
    for (uint32_t number = 0;;) {
      set_thread_and_warpgroup();
      smem.q_ring[warpgroup].wait_full(RingPosition<1>(number));
      RowBlock<Config> const& block = smem.row_block(number);
      if (!block.tile.valid) {
        break;
      }
      Acc acc(Config::kScores != ScoreLevel::Plain ? block.score_mod.exponent_scale()
              : Config::kCodes                     ? block.score_mod.softmax_scale
                                                   : args.params.scores.softmax_scale);
      attend_with_score_mods(block, acc);
      number = block.number + 1;  // read here: no register holds it during the tile
      if constexpr (!kFinishesEarly) {
        finish_rows<Config>(args, block, smem, warpgroup, thread, acc);
      }
      acc.rescale(acc.scale);
      if constexpr (Config::kSplit) {
        store_split<Config>(args, block, warpgroup, thread, acc);
      } else if constexpr (Config::kStoresTiles) {
        store_tile<Config>(args, block, smem.out[warpgroup], warpgroup, thread, acc);
      }
      if constexpr (!Config::kSplit && Config::kTileColumns < Config::kHeadDimV) {
        store<Config>(args, block, warpgroup, thread, acc);
      }
    }
    if constexpr (Config::kStoresTiles) {
      tma_store_wait<0>();  // a CTA's shared memory has to stay until its stores have read it
    }
    ping_pong().end();
  }

  __device__ __forceinline__ void run_storing_late();  // late_store.h

  // Computed anew for each row block, and hidden from the compiler: values derived from it, if kept
  // for the next row block, would make the larger tiles spill.
  __device__ void set_thread_and_warpgroup() {
    int index = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(index));
    thread = index % kWarpgroup;
    warpgroup = __shfl_sync(kAll, index / kWarpgroup, 0) - 1;
  }

  __device__ PingPong<Config> ping_pong() const { return {warpgroup}; }

  // First query of this warpgroup in the row block
  __device__ int first_row() const { return warpgroup * queries(); }
  __device__ int queries() const { return args.rows.template queries_of<Config>(); }

  __device__ __forceinline__ void attend_with_score_mods(RowBlock<Config> const& block, Acc& acc) {
    if constexpr (Config::kScores == ScoreLevel::Plain) {
      attend(block, NoScoreMods{}, acc);
    } else {
      Scores const& scores = args.params.scores;
      ScoreMod const& mod = block.score_mod;
      int const row_begin = block.row_begin + first_row();
      bool const caps = scores.softcap > 0.f, biased = scores.alibi_slopes != nullptr,
                 drops = scores.dropout_p > 0.f, left = block.mask.right <= mod.shift;
      if (caps && mod.has_usual_cap() && !biased && !drops) {
        attend(block, SoftcapMod(mod), acc);
      } else if (drops && !caps && !biased && mod.folds_scale()) {
        attend(block, DropoutMod(block.dropout, row_begin), acc);
      } else if (biased && !caps && !drops && mod.folds_scale() && left) {
        attend(block, LeftBiasMod(mod, row_begin), acc);
      } else {
        attend(block, AnyScoreMods<Config>{block, warpgroup}, acc);
      }
    }
  }

  // What the steps of a row block share.
  template <class ScoreMods_>
  struct Work {
    using ScoreMods = ScoreMods_;
    using Offsets = typename ScoreMods::Offsets;
    RowBlock<Config> const& block;
    ScoreMods const& score_mods;
    int const steps;
    Acc& acc;
    Probabilities& p;  // of the last step so far
  };

  template <class ScoreMods>
  __device__ __forceinline__ void attend(RowBlock<Config> const& block, ScoreMods const& score_mods,
                                         Acc& acc) {
    int const steps = block.range.count();
    int const unseen = unseen_steps(block);
    leave_out_first(unseen);
    if (unseen < steps) {
      Probabilities p;
      Work<ScoreMods> const work{block, score_mods, steps, acc, p};
      // With score mods there is one copy of the code, always masked: a mask may hide nothing.
      if (ScoreMods::kAny || unseen < block.masked_steps) {
        first_step<true>(work, unseen);
      } else {
        first_step<false>(work, unseen);
      }
      other_steps(work, unseen + 1);
    } else {
      see_nothing(block, acc);
    }
    blocks += steps;
  }

  // All steps from `step` on, and the last P·V.
  template <class Work>
  __device__ __forceinline__ void other_steps(Work const& work, int step) {
    BlockRange const& range = work.block.range;
    for (; step < work.block.masked_steps; ++step) {  // read anew, which saves a register
      next_step<true>(work, range.block_at(step), step);
    }
    int const interior = range.interior();
    for (; step < work.steps; ++step) {
      next_step<false>(work, interior - step, step);
    }
    last_values(work);
  }

  __device__ __forceinline__ void see_nothing(RowBlock<Config> const& block, Acc& acc) {
    smem.q_ring[warpgroup].release(0);
    finish_early(block, acc);
  }

  // KV blocks come from the right, so those that none of this warpgroup's rows sees come first.
  __device__ int unseen_steps(RowBlock<Config> const& block) const {
    int const rows = min(block.rows, first_row() + queries());
    return rows > first_row()
               ? block.range.steps_right_of(block.mask, block.row_begin + rows, Config::kBlockN)
               : block.range.count();
  }

  template <bool kPingPong = true>
  __device__ void leave_out_first(int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      Position const here(blocks + step);
      if constexpr (kPingPong) {
        ping_pong().wait();
        ping_pong().pass();
      }
      smem.k_ring.wait_full(here);
      smem.k_ring.release(here);
      smem.v_ring.wait_full(here);
      smem.v_ring.release(here);
    }
  }

  // The last KV block frees Q as well.
  __device__ void release_k(int step, int steps) {
    smem.k_ring.release(Position(blocks + step));
    if (step + 1 == steps) {
      smem.q_ring[warpgroup].release(0);
    }
  }

  // S = Q·Kᵀ, not waited for
  __device__ __forceinline__ void start_scores(Position at, ScoreFragment& s) {
    Tensor q = make_tensor(make_smem_ptr(smem.q), typename Config::SmemLayoutQ{});
    Tensor k = make_tensor(make_smem_ptr(smem.k[0]), typename Config::SmemLayoutK{});
    start_product<false>(MmaScores{}, operand_a<MmaScores>(q(_, _, warpgroup)),
                         operand_b<MmaScores>(k)(_, _, _, at.stage), s);
  }

  // O += P·V, not waited for
  __device__ __forceinline__ void start_values(Position at, Probabilities const& p, Acc& acc) {
    Tensor v = make_tensor(make_smem_ptr(smem.v[0]), typename Config::SmemLayoutV{});
    // acc.out's registers, in the layout of the product, or of several of fewer columns.
    using OutShape = Shape<Int<kWarpgroupRows>, Int<Config::kHeadDimV>>;
    using OfProducts = decltype(partition_fragment_C(MmaValues{}, OutShape{}));
    Tensor out = make_tensor(acc.out.data(), typename OfProducts::layout_type{});
    start_product<true>(MmaValues{}, p, operand_b<MmaValues>(v)(_, _, _, at.stage), out);
  }

  using Visible = VisibleKeys<kColumns>;

  __device__ __forceinline__ Visible visible(RowBlock<Config> const& block, Position here,
                                             int key_block, int r) {
    int const row = Coord(thread).row(r);
    int const query =
        block.row_begin + first_row() + (Config::kPackGqa ? args.rows.heads.quotient(row) : row);
    return Visible(block.mask.limits(query), key_block * Config::kBlockN, Coord(thread),
                   smem.exist[here.in_two_rounds()]);
  }

  __device__ __forceinline__ void find_visible(RowBlock<Config> const& block, Position here,
                                               int key_block, Visible (&seen)[Acc::kRows]) {
#pragma unroll
    for (int r = 0; r < Acc::kRows; ++r) {
      seen[r] = visible(block, here, key_block, r);
    }
  }

  // Applies score mods and the mask to the scores (row, column), and raises the rows' maxima.
  // Returns whether O has to be multiplied by `rescale` first, the same in a whole warp.
  template <bool kMasked, bool kFirst, class Work, class Scores>
  __device__ __forceinline__ bool raise_maxima(Work const& work, Position here, int key_block,
                                               Scores& s, typename Work::Offsets& offsets,
                                               float (&rescale)[Acc::kRows]) {
    auto const& [block, score_mods, steps, acc, p] = work;
    Coord const coord(thread);
    int const key_begin = key_block * Config::kBlockN;
    score_mods.on_scores(s, key_begin, coord, offsets);
    if constexpr (kMasked) {
      int const first = block.row_begin + first_row();
      auto const query_of = [&](int row) {
        return first + (Config::kPackGqa ? args.rows.heads.quotient(row) : row);
      };
      apply_mask(s, block.mask, query_of, key_begin, coord, smem.exist[here.in_two_rounds()]);
    }
    bool moved = false;
    if (kFirst || wants_max_logits<Config>(args) || __any_sync(kAll, may_move(s, offsets, acc))) {
      auto&& tops = tops_of<kFirst>(args, smem, acc);
      moved = __any_sync(
          kAll, acc.softmax.template raise<kColumns>(s, rescale, QuadReduce{}, offsets, tops));
      if (moved) {
        acc.softmax.rescale(rescale);
      }
    }
    return moved;
  }

  template <class Scores, class Offsets>
  __device__ __forceinline__ static bool may_move(Scores const& s, Offsets const& offsets,
                                                  Acc& acc) {
    if constexpr (Config::kMaxLogits == MaxLogitsIn::Registers) {
      return acc.softmax.template may_move<kColumns>(s, acc.tops);
    } else {
      return acc.softmax.template may_move<kColumns>(s, offsets);
    }
  }

  template <class Scores>
  __device__ __forceinline__ static bool may_move_row(int r, Scores const& s, Acc& acc) {
    if constexpr (Config::kMaxLogits == MaxLogitsIn::Registers) {
      return acc.softmax.template may_move_row<kColumns>(r, s, acc.slack, acc.tops);
    } else {
      return acc.softmax.template may_move_row<kColumns>(r, s, acc.slack);
    }
  }

  // Whether the row's maximum moved.
  template <class Scores>
  __device__ __forceinline__ static bool raise_row(int r, Scores const& s, float& rescale,
                                                   Acc& acc) {
    return acc.softmax.template raise_row<kColumns>(r, s, rescale, QuadReduce{}, NoOffsets{},
                                                    acc.tops);
  }

  // Scores become probabilities.
  template <class Work, class Scores>
  __device__ __forceinline__ void probabilities(Work const& work, int key_block, Scores& s,
                                                typename Work::Offsets const& offsets) {
    work.acc.softmax.template exponentials<kColumns>(s, offsets);
    if constexpr (Work::ScoreMods::kAny) {
      work.acc.softmax.keep_sums_here();
    }
    work.score_mods.on_probabilities(s, key_block * Config::kBlockN, Coord(thread));
  }

  __device__ static void to_operand(ScoreFragment const& s, Probabilities& p) {
    Tensor words = recast<uint32_t>(p);
    pack<ValueElement>(s, words);
  }

  template <bool kMasked, class Work>
  __device__ __forceinline__ void first_step(Work const& work, int step) {
    ScoreFragment s;
    start_first_scores(step, s);
    end_first_step<kMasked>(work, step, s);
  }

  // The ping-pong barrier is passed when the scores are there; with late stores it is passed at
  // once, so that the store of a row block does not hold up the other consumer.
  __device__ __forceinline__ void start_first_scores(int step, ScoreFragment& s) {
    Position const here(blocks + step);
    smem.k_ring.wait_full(here);
    ping_pong().wait();
    start_scores(here, s);
    if constexpr (Config::kStoresLate) {
      ping_pong().pass();
    }
  }

  template <bool kMasked, class Work>
  __device__ __forceinline__ void end_first_step(Work const& work, int step, ScoreFragment& s) {
    using ScoreMods = typename Work::ScoreMods;
    auto const& [block, score_mods, steps, acc, p] = work;
    Position const here(blocks + step);
    int const key_block = block.range.block_at(step);
    Visible seen[Acc::kRows];  // worked out while the product runs
    if constexpr (kMasked && !ScoreMods::kAny) {
      find_visible(block, here, key_block, seen);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    if constexpr (!Config::kStoresLate) {
      ping_pong().pass();
    }
    release_k(step, steps);
    Tensor scores = make_tensor(s.data(), rows_and_columns(s.layout()));
    if constexpr (ScoreMods::kAny) {
      typename Work::Offsets offsets{};
      float rescale[Acc::kRows];
      raise_maxima<kMasked, true>(work, here, key_block, scores, offsets, rescale);
      probabilities(work, key_block, scores, offsets);
    } else {
      first_probabilities<kMasked>(seen, scores, acc);
    }
    to_operand(s, p);
    smem.v_ring.wait_full(here);
    if (kRowByRow<ScoreMods> && step + 1 < steps) {
      smem.k_ring.wait_full(Position(blocks + step + 1));
    }
  }

  // The first scores become probabilities, one row after the other; no maximum was there before.
  template <bool kMasked, class Scores>
  __device__ __forceinline__ void first_probabilities(Visible const (&seen)[Acc::kRows], Scores& s,
                                                      Acc& acc) {
    auto& softmax = acc.softmax;
#pragma unroll
    for (int r = 0; r < Acc::kRows; ++r) {
      if constexpr (kMasked) {
        seen[r].hide_others(s, r);
      }
      float rescale;
      raise_row(r, s, rescale, acc);
      softmax.template exponentials_of_row<kColumns>(r, s);
    }
  }

  // Q·Kᵀ of this block, then P·V of the one before; the softmax of this one runs under the latter.
  template <bool kMasked, class Work>
  __device__ __forceinline__ void next_step(Work const& work, int key_block, int step) {
    using ScoreMods = typename Work::ScoreMods;
    auto const& [block, score_mods, steps, acc, p] = work;
    Position const here(blocks + step), before(blocks + step - 1);
    ScoreFragment s;
    if constexpr (!kRowByRow<ScoreMods>) {
      smem.k_ring.wait_full(here);
    }
    ping_pong().wait();
    start_scores(here, s);
    start_values(before, p, acc);
    Visible seen[Acc::kRows];
    if constexpr (kMasked && kRowByRow<ScoreMods>) {
      find_visible(block, here, key_block, seen);
    }
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    ping_pong().pass();
    release_k(step, steps);
    Tensor scores = make_tensor(s.data(), rows_and_columns(s.layout()));
    if constexpr (!kRowByRow<ScoreMods>) {
      typename Work::Offsets offsets{};
      float rescale[Acc::kRows];
      bool const moved =
          raise_maxima<kMasked, false>(work, here, key_block, scores, offsets, rescale);
      probabilities(work, key_block, scores, offsets);
      // Waits after the sums, as in wait_for_keys.
      bool const never = acc.softmax.sum[0] + acc.softmax.sum[1] < 0.f;
      smem.v_ring.wait_full(never ? before : here);
      finish_values(before, acc);
      // This is rare (see OnlineSoftmax), and a tenth of all instructions here.
      if (moved) {
        acc.rescale(rescale);
      }
    } else {
      if constexpr (kMasked) {
#pragma unroll
        for (int r = 0; r < Acc::kRows; ++r) {
          seen[r].hide_others(scores, r);
        }
      }
      row_by_row(work, step, scores);
    }
    to_operand(s, p);
  }

  // Scores become probabilities, one row after the other, and P·V of the block before is added to
  // O. The wait for O lies between the two rows, when O is likely to be there: its rescaling and
  // the conversions then run among the second row's exponentials, and no wait comes last. The vote
  // on the second row's maximum runs under the wait.
  template <class Work, class Scores>
  __device__ __forceinline__ void row_by_row(Work const& work, int step, Scores& s) {
    Acc& acc = work.acc;
    auto& softmax = acc.softmax;
    float rescale[Acc::kRows] = {1.f, 1.f};
    int moved = 0;  // the same in a warp
    if (__any_sync(kAll, may_move_row(0, s, acc))) {
      moved = __any_sync(kAll, raise_row(0, s, rescale[0], acc));
      softmax.sum[0] *= rescale[0];
    }
    softmax.template exponentials_of_row<kColumns>(0, s);
    int const asks = __any_sync(kAll, may_move_row(1, s, acc) || moved);
    wait_for_keys(step, work.steps, softmax.sum[0]);
    finish_values(Position(blocks + step - 1), acc);
    if (asks) {
      moved |= __any_sync(kAll, raise_row(1, s, rescale[1], acc));
      softmax.sum[1] *= rescale[1];
      if (moved) {
        acc.rescale(rescale);
      }
    }
    softmax.hold_row(1);
    softmax.template exponentials_of_row<kColumns>(1, s);
  }

  // Waits for P·V of a block.
  __device__ __forceinline__ void finish_values(Position at, Acc& acc) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc.out);
    smem.v_ring.release(at);
  }

  // Waits for V of a step and K of the next together, once `sum` is known. Left alone, the compiler
  // puts the wait for P·V before the exponentials that are to run under it. It keeps waits in
  // order, and does not know that sums are never negative.
  __device__ __forceinline__ void wait_for_keys(int step, int steps, float sum) {
    Position here(blocks + step), next(blocks + step + 1);
    here.phase ^= sum < 0.f;  // NaN leaves the phase as it is
    bool const v = smem.v_ring.is_full(here);
    bool const k = step + 1 >= steps || smem.k_ring.is_full(next);
    if (!(v && k)) {
      smem.v_ring.wait_full(here);
      if (step + 1 < steps) {
        smem.k_ring.wait_full(next);
      }
    }
    compiler_fence();
  }

  template <class Work>
  __device__ __forceinline__ void last_values(Work const& work) {
    Position const at(blocks + work.steps - 1);
    start_values(at, work.p, work.acc);
    finish_early(work.block, work.acc);
    finish_values(at, work.acc);
  }

  __device__ __forceinline__ void finish_early(RowBlock<Config> const& block, Acc& acc) {
    if constexpr (kFinishesEarly) {
      finish_rows<Config>(args, block, smem, warpgroup, thread, acc);
    }
  }
};

}  // namespace flash::sm90::forward
