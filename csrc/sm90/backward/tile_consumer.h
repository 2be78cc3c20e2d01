// A consumer warpgroup of the tiles and the KV-persistent schedule.
#pragma once

#include "sm90/backward/consumer_steps.h"
#include "sm90/backward/half_factors_tile.h"
#include "sm90/backward/one_mod_tile.h"

namespace flash::sm90::backward {

template <class Config>
struct TileConsumer : ConsumerSteps<Config> {
  using Base = ConsumerSteps<Config>;
  using Base::args, Base::smem, Base::warpgroup, Base::thread, Base::iterations, Base::shared,
      Base::at, Base::kAll;
  using typename Base::Block, typename Base::DoutPosition, typename Base::Iteration,
      typename Base::KeyPosition, typename Base::Next, typename Base::Operand,
      typename Base::Position, typename Base::QueryFragment, typename Base::ScoreFragment,
      typename Base::Sums, typename Base::ValuePosition;
  using NumbersAhead = RowNumbersAhead<Config::kBlockM / 4>;
  struct Nothing {};
  using LseAhead = std::conditional_t<Config::kReadsLseAhead, NumbersAhead, Nothing>;

  LseAhead lse_ahead{};  // of the next iteration's rows
  float largest = 0.f;   // largest |score| of this thread in the next iteration

  __device__ __forceinline__ void run() {
    Base::find_warpgroup();
    for (uint32_t number = 0;;) {
      Base::find_thread();
      smem.k_ring.wait_full(KeyPosition(number));
      Block const& block = smem.key_block(number);
      if (!block.tile.valid) {
        break;
      }
      Sums sums;
      smem.v_ring.wait_full(ValuePosition(number));
      if (block.range.count() > 0) {
        iterate(block, sums);
      }
      smem.k_ring.release(0);
      smem.v_ring.release(0);
      number = block.number + 1;  // read here: no register holds it during the tile
      int const first = warpgroup * kWarpgroupRows;
      store_key_rows(rows_of_dk(args.params), block, first, thread, sums.dk);
      store_key_rows(rows_of_dv(args.params, Config::kProbabilityUnit), block, first, thread,
                     sums.dv);
    }
  }

 private:
  // What an iteration does with the dQ of the row block before.
  enum class QueryEnd {
    Asked,  // what the call asks for
    Added,
    Stored,
    Ordered,  // what the iteration's action says
  };
  static constexpr QueryEnd kQueryEnd = Config::kOrdersDq ? QueryEnd::Ordered : QueryEnd::Asked;

  // How far the loop over a tile has come.
  struct Progress {
    int count;     // of iterations, if they are counted
    int done = 0;  // of them
    bool begun = false;

    __device__ bool has_begun(bool counts) const { return counts ? done > 0 : begun; }
    __device__ void advance() {
      ++done;
      begun = true;
    }
  };

  // Iterates over the rows of all query heads of the GQA split, head by head.
  __device__ __forceinline__ void iterate(Block const& block, Sums& sums) {
    ScoreFragment s;
    Base::share_zeros();
    Base::first_scores(/*key_stage=*/0, s);
    choose_loop(block, sums, s);
    QueryFragment dq;
    Base::d_query(shared - 1, /*key_stage=*/0, dq);
    warpgroup_wait<0>();
    Base::end_query(shared - 1, dq);
    put_query<kQueryEnd>(block, true, smem.row_iteration(iterations - 1), dq);
  }

  // Plain scores have one loop, or one for each thing that a call may ask for dQ. Each score mod
  // has a loop of its own where that is faster: 3% at d 64 (H200).
  __device__ __forceinline__ void choose_loop(Block const& block, Sums& sums, ScoreFragment& s) {
    using Whole = ScoreTile<false, Config>;
    using Masked = ScoreTile<true, Config>;
    if constexpr (Config::kHalfFactors) {
      switch (score_mod_kind(args.params.scores)) {
        case ScoreModKind::Cap:
          return loop<kQueryEnd, HalfFactorsTile<ScoreModKind::Cap, Config>>(block, sums, s);
        case ScoreModKind::Bias:
          return loop<kQueryEnd, HalfFactorsTile<ScoreModKind::Bias, Config>>(block, sums, s);
        case ScoreModKind::Drop:
          return loop<kQueryEnd, HalfFactorsTile<ScoreModKind::Drop, Config>>(block, sums, s);
        case ScoreModKind::Any:
          return loop<kQueryEnd, HalfFactorsTile<ScoreModKind::Any, Config>>(block, sums, s);
      }
    } else if constexpr (Config::kHasCapLoop) {
      if (score_mod_kind(args.params.scores) == ScoreModKind::Cap) {
        return loop<kQueryEnd, OneModTile<ScoreModKind::Cap, Config>>(block, sums, s);
      }
      loop<kQueryEnd, Whole, Masked>(block, sums, s);
    } else if constexpr (Config::kOwnLoopToAdd) {
      if (args.params.workspace.dq) {
        return loop<QueryEnd::Added, Whole, Masked>(block, sums, s);
      }
      loop<QueryEnd::Stored, Whole, Masked>(block, sums, s);
    } else {
      loop<kQueryEnd, Whole, Masked>(block, sums, s);
    }
  }

  // The loop over a tile's row blocks: one body for masked and whole ones, or two.
  template <QueryEnd kEnd, class Whole, class Masked = Whole>
  __device__ __forceinline__ void loop(Block const& block, Sums& sums, ScoreFragment& s) {
    constexpr bool kCounts = Whole::kCountsIterations;
    read_lse_ahead(at);
    if constexpr (Whole::kScansAhead) {
      largest = largest_of(s);
    }
    Progress progress{kCounts ? block.range.count() * block.heads : 0};
#pragma unroll 1
    for (bool more = true; more; progress.advance()) {
      if constexpr (std::is_same_v<Whole, Masked>) {
        more = iteration<Whole, kEnd>(block, progress, sums, s);
      } else {
        more = smem.row_iteration(iterations).masked
                   ? iteration<Masked, kEnd>(block, progress, sums, s)
                   : iteration<Whole, kEnd>(block, progress, sums, s);
      }
    }
  }

  // One row block: P and dS from its scores, then dV and dK; dQ of the row block before, for which
  // all warpgroups have written dS by now, so that no consumer waits for another; and the scores of
  // the next row block, which become `s`. Returns whether there is a next.
  template <class Tile, QueryEnd kEnd>
  __device__ __forceinline__ bool iteration(Block const& block, Progress const& progress,
                                            Sums& sums, ScoreFragment& s) {
    Base::find_thread_again();
    Iteration const& rows = smem.row_iteration(iterations);
    Next next{at};
    if constexpr (Tile::kCountsIterations) {
      next.follows(__any_sync(kAll, progress.done + 1 < progress.count));
    }
    DoutPosition const dout_at = Base::dout_position();
    ScoreFragment dp, s_next;
    Operand p, ds;
    QueryFragment dq;
    Base::d_probabilities(dout_at, dp);
    if constexpr (Config::kStartsFirst) {
      __syncwarp();  // ptxas moves no part of a product past it
    }
    Tile tile(args, block, rows, warpgroup, thread);
    if constexpr (Tile::kScansAhead) {
      tile.largest = largest;
    }
    Tensor p_words = recast<uint32_t>(p);
    // A copy: with lse_ahead in its place, ptxas spills 632 bytes, not 108.
    auto const lse = this->lse();
    tile.probabilities(s, p_words, lse);
    Base::d_values(p, dout_at, /*adds=*/true, sums);
    using Delta = std::conditional_t<Tile::kReadsAhead, NumbersAhead, RowNumbers>;
    Delta const softmax_d(Base::numbers(smem.stats[at.stage].softmax_d));
    warpgroup_wait<1>();
    warpgroup_fence_operand(dp);
    Base::d_scores(tile, s, p_words, softmax_d, dp, ds);
    Base::d_query(shared - 2, /*key_stage=*/0, dq);

    auto const d_keys = [&] { Base::d_keys(ds, /*adds=*/true, sums); };
    auto const end_values = [&] { Base::end_values(p, dout_at, sums); };
    auto const end_query = [&](Iteration const& rows_before) {
      Base::end_query(shared - 2, dq);
      put_query<kEnd>(block, progress.has_begun(Tile::kCountsIterations), rows_before, dq);
    };
    // Scores are started after the last row block as well, from rows that are in shared memory:
    // ptxas waits at once for a product that not every iteration starts. They do not go to `s`,
    // whose factors would keep its registers until here.
    auto const wait_for_rows = [&] {
      if constexpr (!Tile::kCountsIterations) {
        next.follows(rows.more);
      }
      smem.q_ring.wait_full(next.at);
      read_lse_ahead(next.at);
    };
    auto const next_scores = [&] { Base::scores(next.at, /*key_stage=*/0, s_next); };

    if constexpr (Tile::kScansAhead) {
      wait_for_rows();
      warpgroup_wait<1>();
      end_values();
      next_scores();
      d_keys();
      warpgroup_wait<2>();
      end_query(smem.row_iteration(iterations - 1));
      warpgroup_wait<1>();
      warpgroup_fence_operand(s_next);
      largest = largest_of(s_next);
    } else if constexpr (Config::kScoresFirst) {
      d_keys();
      std::conditional_t<Tile::kReadsAhead, Iteration const, Iteration const&> rows_before =
          smem.row_iteration(iterations - 1);
      warpgroup_wait<2>();
      end_values();
      wait_for_rows();
      next_scores();
      warpgroup_wait<2>();
      end_query(rows_before);
    } else {
      d_keys();
      warpgroup_wait<1>();
      end_values();
      end_query(smem.row_iteration(iterations - 1));
      wait_for_rows();
      next_scores();
    }
    Base::advance(ds, s_next, sums, s);
    return next.more;
  }

  __device__ __forceinline__ void read_lse_ahead(Position const& rows_at) {
    if constexpr (Config::kReadsLseAhead) {
      lse_ahead = NumbersAhead(Base::numbers(smem.stats[rows_at.stage].lse_log2));
    }
  }
  __device__ __forceinline__ auto lse() const {
    if constexpr (Config::kReadsLseAhead) {
      return lse_ahead;
    } else {
      return Base::numbers(smem.stats[at.stage].lse_log2);
    }
  }

  // wanted: dq belongs to the row block of `rows`, and not to none.
  template <QueryEnd kEnd>
  __device__ __forceinline__ void put_query(Block const& block, bool wanted, Iteration const& rows,
                                            QueryFragment& dq) {
    QueryGradient<Config> const gradient = Base::query_gradient(block);
    if constexpr (kEnd == QueryEnd::Ordered) {
      if (wanted) {
        gradient.leave(dq, rows, iterations - 1);
      }
    } else {
      bool const adds =
          kEnd == QueryEnd::Asked ? args.params.workspace.dq != nullptr : kEnd == QueryEnd::Added;
      if (wanted && adds) {
        gradient.add(dq, rows.row_block, iterations - 1);
      } else if (wanted && kEnd != QueryEnd::Added && args.params.dq.ptr) {
        gradient.store(dq, rows.row_block);
      }
    }
  }
};

}  // namespace flash::sm90::backward
