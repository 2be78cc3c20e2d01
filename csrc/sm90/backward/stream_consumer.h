// A consumer warpgroup in a stream of tiles (OrderedDqConfig): it is not idle behind a product
// between two of them.
#pragma once

#include "sm90/backward/consumer.h"

namespace flash::sm90::backward {

template <class Config>
struct StreamConsumer : Consumer<Config> {
  using Base = Consumer<Config>;
  using Base::args, Base::smem, Base::warpgroup, Base::thread, Base::iterations, Base::shared,
      Base::tiles, Base::keys, Base::started, Base::crosses;
  using typename Base::Block, typename Base::KeyPosition, typename Base::QueryEnd,
      typename Base::QueryFragment, typename Base::ScoreFragment, typename Base::Sums,
      typename Base::ValuePosition;

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
      Base::start_first_scores(s);
    }
    smem.v_ring.wait_full(ValuePosition(tiles));
    Base::template iterate_each<QueryEnd::Asked>(block, sums, s);
    if (!crosses) {
      end_last_query_gradient(block);
    }
  }

  // The tile's last dS stays: for the next tile's first iteration it is that of the row block
  // before.
  __device__ __forceinline__ void end_last_query_gradient(Block const& block) {
    QueryFragment dq;
    Base::start_query_gradient(shared - 1, dq, keys.stage);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dq);
    Base::template put_query_gradient<QueryEnd::Asked>(block, true,
                                                       smem.row_iteration(iterations - 1), dq);
    smem.k_ring.release(keys);
  }
};

}  // namespace flash::sm90::backward
