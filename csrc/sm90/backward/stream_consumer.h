// A consumer warpgroup of ordered dQ, in a stream of tiles (OrderedDqConfig): the last step of a
// tile starts the next tile's first scores, so the tensor cores are not idle between tiles.
#pragma once

#include "sm90/backward/consumer_steps.h"

namespace flash::sm90::backward {

template <class Config>
struct StreamConsumer : ConsumerSteps<Config> {
  using Base = ConsumerSteps<Config>;
  using Base::args, Base::smem, Base::warpgroup, Base::thread, Base::iterations, Base::shared,
      Base::at, Base::kAll;
  using typename Base::Block, typename Base::DoutPosition, typename Base::Iteration,
      typename Base::KeyPosition, typename Base::Next, typename Base::Operand,
      typename Base::QueryFragment, typename Base::ScoreFragment, typename Base::Sums,
      typename Base::ValuePosition;

  uint32_t tiles = 0;    // tiles before this one
  KeyPosition keys{0};   // of this tile's K
  bool started = false;  // the tile before started the first scores; its last dQ is still to come
  bool crosses = false;  // this iteration starts the next tile's scores

  __device__ __forceinline__ void run() {
    Base::find_warpgroup();
    Base::find_thread();
    Base::share_zeros();
    ScoreFragment s;
    Sums sums;
    for (;; keys = KeyPosition(++tiles)) {
      Base::find_thread();
      smem.k_ring.wait_full(keys);  // announces the KV block: K comes with the first Q
      Block const& block = smem.key_block(tiles);
      if (!block.tile.valid) {
        break;
      }
      if (block.range.count() > 0) {
        iterate(block, sums, s);
      } else {
        smem.v_ring.wait_full(ValuePosition(tiles));
        smem.k_ring.release(keys);
        smem.v_ring.release(0);
        sums.begin();
      }
      int const first = warpgroup * kWarpgroupRows;
      store_key_rows(plain_rows_of_dk(args.params), block, first, thread, sums.dk);
      store_key_rows(plain_rows_of_dv(args.params), block, first, thread, sums.dv);
    }
  }

 private:
  // The last iteration releases V; K is released when the last dQ is there, here or in the next
  // tile.
  __device__ __forceinline__ void iterate(Block const& block, Sums& sums, ScoreFragment& s) {
    started = crosses;
    if (!started) {
      Base::first_scores(keys.stage, s);
    }
    smem.v_ring.wait_full(ValuePosition(tiles));
    int const count = block.range.count() * block.heads;
    int done = 0;
#pragma unroll 1
    for (bool more = true; more; ++done) {
      more = smem.row_iteration(iterations).masked
                 ? iteration<ScoreTile<true, Config>>(block, done, count, sums, s)
                 : iteration<ScoreTile<false, Config>>(block, done, count, sums, s);
    }
    if (!crosses) {
      end_last_query(block);
    }
  }

  // One row block, as of other schedules (tile_consumer.h). A tile's first iteration may end the
  // last dQ of the tile before, and its last one may start the first scores of the next tile.
  template <class Tile>
  __device__ __forceinline__ bool iteration(Block const& block, int done, int count, Sums& sums,
                                            ScoreFragment& s) {
    Base::find_thread_again();
    Iteration const& rows = smem.row_iteration(iterations);
    Next next{at};
    next.follows(__any_sync(kAll, done + 1 < count));
    crosses = __any_sync(kAll, rows.followed);
    if (crosses) {
      next.at.advance();
    }
    bool const late = started && done == 0;  // the dQ that ends here belongs to the tile before
    bool const adds = done > 0;              // to dK and dV so far
    KeyPosition const next_keys(tiles + crosses), keys_before(tiles - late);
    DoutPosition const dout_at = Base::dout_position();
    ScoreFragment dp, s_next;
    Operand p, ds;
    QueryFragment dq;
    Base::d_probabilities(dout_at, dp);
    auto const& stats = smem.stats[at.stage];
    Tile tile(args, block, rows, warpgroup, thread);
    Tensor p_words = recast<uint32_t>(p);
    tile.probabilities(s, p_words, Base::numbers(stats.lse_log2));
    Base::d_values(p, dout_at, adds, sums);
    warpgroup_wait<1>();
    warpgroup_fence_operand(dp);
    if (!next.more) {
      smem.v_ring.release(0);
    }
    Base::d_scores(tile, s, p_words, Base::numbers(stats.softmax_d), dp, ds);
    Base::d_query(shared - 2, keys_before.stage, dq);
    Base::d_keys(ds, adds, sums);

    auto const end_query = [&] {
      Base::end_query(shared - 2, dq);
      if (late || done > 0) {
        put_query(late ? smem.key_block(tiles - 1) : block, dq);
      }
      if (late) {
        smem.k_ring.release(keys_before);
      }
    };
    auto const next_scores = [&] {
      smem.q_ring.wait_full(next.at);
      Base::scores(next.at, next_keys.stage, s_next);
    };
    warpgroup_wait<Config::kScoresFirst ? 2 : 1>();
    Base::end_values(p, dout_at, sums);
    if constexpr (Config::kScoresFirst) {
      next_scores();
      warpgroup_wait<2>();
      end_query();
    } else {
      end_query();
      next_scores();
    }
    Base::advance(ds, s_next, sums, s);
    return next.more;
  }

  // The tile's last dS stays: the next tile's first iteration takes it for the dS of the row block
  // before.
  __device__ __forceinline__ void end_last_query(Block const& block) {
    QueryFragment dq;
    Base::d_query(shared - 1, keys.stage, dq);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dq);
    put_query(block, dq);
    smem.k_ring.release(keys);
  }

  __device__ __forceinline__ void put_query(Block const& block, QueryFragment& dq) {
    Base::query_gradient(block).leave(dq, smem.row_iteration(iterations - 1), iterations - 1);
  }
};

}  // namespace flash::sm90::backward
