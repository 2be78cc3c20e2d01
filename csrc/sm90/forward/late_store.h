// A consumer warpgroup that stores each row block's O while the next one's first scores are
// computed (kStoresLate).
#pragma once

#include "sm90/forward/consumer.h"

namespace flash::sm90::forward {

// A warpgroup has no other work of this row block that hides the store, so the next row block's
// first scores are started before it. O waits in 16 bits, in the registers that its accumulators
// had.
template <class Config>
__device__ __forceinline__ void Consumer<Config>::run_storing_late() {
  set_thread_and_warpgroup();
  ping_pong().begin();
  FinishedRows<Config> rows;  // of the row block before
  for (uint32_t number = 0;;) {
    set_thread_and_warpgroup();
    smem.q_ring[warpgroup].wait_full(RingPosition<1>(number));
    RowBlock<Config> const& block = smem.row_block(number);
    bool const valid = block.tile.valid;
    int const steps = valid ? block.range.count() : 0;
    int const unseen = valid ? unseen_steps(block) : 0;
    leave_out_first(unseen);
    ScoreFragment s;
    if (unseen < steps) {
      start_first_scores(unseen, s);
    }
    if (number > 0) {
      store_runs<Config>(args, smem.row_block(number - 1), smem.out[warpgroup], warpgroup, thread,
                         rows);
    }
    if (!valid) {
      warpgroup_wait<0>();  // nothing is left to wait for, which ptxas does not know
      break;
    }
    Acc acc(args.params.scores.softmax_scale);
    if (unseen < steps) {
      Probabilities p;
      NoScoreMods const none;
      Work<NoScoreMods> const work{block, none, steps, acc, p};
      if (unseen < block.masked_steps) {
        end_first_step<true>(work, unseen, s);
      } else {
        end_first_step<false>(work, unseen, s);
      }
      other_steps(work, unseen + 1);
    } else {
      warpgroup_wait<0>();  // as above
      see_nothing(block, acc);
    }
    blocks += steps;
    number = block.number + 1;
    acc.rescale(acc.scale);
    pack<Element>(acc.out, rows);
  }
  tma_store_wait<0>();
  ping_pong().end();
}

}  // namespace flash::sm90::forward
