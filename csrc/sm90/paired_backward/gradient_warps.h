// The warpgroup that computes dK of a CTA's keys, and dQ over the pair's keys in half of the pair's
// columns.
#pragma once

#include "sm90/backward/query_gradient.h"
#include "sm90/operand.h"
#include "sm90/paired_backward/shared_storage.h"

namespace flash::sm90::backward {

template <class Config>
struct GradientWarps {
  using Element = typename Config::Element;
  using MmaKeys = typename Config::MmaKeys;
  using MmaQuery = typename Config::MmaQuery;
  using Block = KeyBlock<Config>;
  using KeyFragment =
      decltype(partition_fragment_C(MmaKeys{}, Shape<Int<Config::kKeys>, Int<Config::kColumns>>{}));
  using QueryFragment = typename QueryGradient<Config>::Fragment;

  BackwardArgs const& args;
  PairedStorage<Config>& smem;
  CtaPart<Config> part;
  int thread;  // of the warpgroup
  RingPositions<Config> at = {};

  __device__ __forceinline__ void run() {
    for (uint32_t number = 0;;) {
      smem.k_ring.wait_full(RingPosition<1>(number));
      Block const& block = smem.key_block(number);
      if (!block.tile.valid) {
        break;
      }
      KeyFragment dk;
      clear(dk);
      iterate(block, dk);
      number = block.number + 1;  // read here: no register holds it during the tile
      store_key_rows(rows_of_dk(args.params).from(part.first_column()), block, part.first_key(),
                     thread, dk);
    }
  }

 private:
  static constexpr int64_t kNone = -1;

  __device__ __forceinline__ void iterate(Block const& block, KeyFragment& dk) {
    int const heads = block.heads, count = block.range.count();
    QueryFragment dq;
    int64_t last = kNone;  // the row block whose dQ is to be added
    for (int head = 0; head < heads; ++head) {
#pragma unroll 1
      for (int step = 0; step < count; ++step) {
        iteration(block, last, dk, dq);
        last = block.row_block(head, block.range.from_last(step));
      }
    }
    smem.k_ring.release(0);
    add(block, last, dq);
  }

  // `last`: the row block of the iteration before, whose dQ is still in the registers. It is added
  // when the other warpgroup has shared its dS and waits for products; right after dQ's product,
  // the additions would be in the way of what that warpgroup reads from shared memory.
  __device__ __forceinline__ void iteration(Block const& block, int64_t last, KeyFragment& dk,
                                            QueryFragment& dq) {
    auto const q_at = at.q();
    auto const ds_at = at.ds();
    smem.ds_ring.wait_full(ds_at);
    add(block, last, dq);
    start_key_gradient(q_at.stage, ds_at.stage, dk);
    smem.other_ds_ring.wait_full(ds_at);
    start_query_gradient<false>(smem.ds[0], own_k(), ds_at.stage, dq);
    start_query_gradient<true>(smem.other_ds[0], smem.other_k, ds_at.stage, dq);
    warpgroup_wait<2>();
    warpgroup_fence_operand(dk);
    smem.q_ring.release_in_pair(q_at.stage, part.pair_begin());
    warpgroup_wait<0>();
    warpgroup_fence_operand(dq);
    smem.ds_ring.release_in_pair(ds_at.stage, part.pair_begin());
    at.advance();
  }

  __device__ __forceinline__ void add(Block const& block, int64_t row_block, QueryFragment& dq) {
    QueryGradient<Config> const gradient{args, smem.dq_semaphore, block,
                                         static_cast<int>(part.rank), thread};
    if (row_block == kNone) {
      return;
    }
    if constexpr (Config::kOrdersDq) {
      gradient.leave(dq, smem.dq_iteration(at.iterations - 1), at.iterations - 1);
    } else if (args.params.workspace.dq) {
      gradient.add(dq, row_block, at.iterations - 1);
    } else if (args.params.dq.ptr) {
      gradient.store(dq, row_block);
    }
  }

  // Half of the columns of this CTA's K.
  __device__ Element* own_k() { return smem.k + part.key_half() * Config::kTileHalfK; }

  // dK += dSᵀ·Q, not waited for
  __device__ __forceinline__ void start_key_gradient(int stage, int score_stage, KeyFragment& dk) {
    Tensor ds = make_tensor(make_smem_ptr(smem.ds[0]), typename Config::SmemLayoutDS{});
    Tensor q = make_tensor(make_smem_ptr(smem.q[0]), typename Config::SmemLayoutQt{});
    start_product<true>(MmaKeys{}, operand_a<MmaKeys>(ds)(_, _, _, score_stage),
                        operand_b<MmaKeys>(q)(_, _, _, stage), dk);
  }

  // dQ (+)= dS·K over the keys of one CTA, not waited for
  template <bool kAccumulate>
  __device__ __forceinline__ void start_query_gradient(Element* scores, Element* half_k,
                                                       int score_stage, QueryFragment& dq) {
    Tensor ds = make_tensor(make_smem_ptr(scores), typename Config::SmemLayoutDSt{});
    Tensor k = make_tensor(make_smem_ptr(half_k), typename Config::SmemLayoutHalfKt{})(_, _, 0);
    start_product<kAccumulate>(MmaQuery{}, operand_a<MmaQuery>(ds)(_, _, _, score_stage),
                               operand_b<MmaQuery>(k), dq);
  }
};

}  // namespace flash::sm90::backward
