// A computing warpgroup: 64 keys against the row blocks that go by.
#pragma once

#include "sm90/backward/query_gradient.h"
#include "sm90/backward/scores.h"
#include "sm90/backward/shared_storage.h"
#include "sm90/backward/store.h"

namespace flash::sm90 {

template <class Config>
struct Consumer {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  using ScorePosition = RingPosition<Config::kScoreStages>;
  using MmaScores = typename Config::MmaScores;
  using MmaQuery = typename Config::MmaQuery;
  using ScoreShape = Shape<Int<kWarpgroupRows>, Int<Config::kBlockM>>;
  using ScoreFragment = decltype(partition_fragment_C(MmaScores{}, ScoreShape{}));
  // Pᵀ and dSᵀ in registers, the A operands of dV and dK
  using Operand =
      decltype(make_tensor<Element>(as_operand_a(typename ScoreFragment::layout_type{})));

  using QueryFragment = typename QueryGradient<Config>::Fragment;
  using Block = KeyBlock<Config>;
  using Visit = typename SharedStorage<Config>::Visit;
  using Sums = KeyGradients<Config>;

  BackwardArgs const& args;
  SharedStorage<Config>& smem;
  int warpgroup = 0;    // of those that compute
  int thread = 0;       // of the warpgroup
  uint32_t visits = 0;  // row blocks so far
  uint32_t shared = 0;  // dS so far

  __device__ __forceinline__ void run() {
    for (uint32_t number = 0;;) {
      find_place();
      smem.k_ring.wait_full(RingPosition<1>(number));
      Block const& block = smem.key_block(number);
      if (!block.tile.valid) {
        break;
      }
      Sums sums;
      smem.v_ring.wait_full(RingPosition<1>(number));
      if (block.range.count() > 0) {
        visit_rows(block, sums);
      }
      smem.k_ring.release(0);
      smem.v_ring.release(0);
      number = block.number + 1;  // not kept in a register until here
      int const first = warpgroup * kWarpgroupRows;
      store_key_rows(rows_of_dk(args.params), block, first, thread, sums.dk);
      store_key_rows(rows_of_dv(args.params), block, first, thread, sums.dv);
    }
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;  // lanes

  // Anew, and not known to be the same: what follows from it, kept, would not fit the registers.
  __device__ void find_place() {
    int index = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(index));
    thread = index % kWarpgroup;
    warpgroup = __shfl_sync(kAll, index / kWarpgroup, 0) - 1;
  }

  // The rows of all query heads of the part, head by head.
  __device__ __forceinline__ void visit_rows(Block const& block, Sums& sums) {
    ScoreFragment s;
    share_zeros();
    start_scores_of_keys(visits, s);
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    bool first = true;
#pragma unroll 1
    for (bool more = true; more; first = false) {
      more = smem.row_visit(visits).masked ? visit<true>(block, first, sums, s)
                                           : visit<false>(block, first, sums, s);
    }
    QueryFragment dq;
    start_query_gradient(shared - 1, dq);
    warpgroup_wait<0>();
    finish_query_gradient(block, shared - 1, true, smem.row_visit(visits - 1), dq);
  }

  // One row block: P and dS from its scores, then dV and dK; dQ of the row block before, for which
  // all warpgroups' dS is there by now, so that nobody waits for another; and the scores of the
  // next, which become `s`. Returns whether there is a next.
  template <bool kMasked>
  __device__ __forceinline__ bool visit(Block const& block, bool first, Sums& sums,
                                        ScoreFragment& s) {
    if constexpr (!Config::kShareRows) {
      find_place();  // with twice the rows it takes more registers than it frees
    }
    Position const here(visits);
    RowVisit const& rows = smem.row_visit(visits);
    ScoreFragment dp;
    smem.dout_ring.wait_full(here);
    start_scores(smem.v, typename Config::SmemLayoutV{}, smem.dout[0],
                 typename Config::SmemLayoutDO{}, here.stage, dp);
    auto const& stats = smem.stats[here.stage];
    ScoreTile<kMasked, Config> tile(args.params, block, rows.head, rows.m_block, warpgroup, thread);
    Operand p, ds;
    Tensor p_words = recast<uint32_t>(p);
    tile.probabilities(s, p_words, numbers(stats.lse_log2));
    start_sum<typename Config::MmaValues>(p, smem.dout[0], typename Config::SmemLayoutDOt{},
                                          here.stage, sums.dv);
    warpgroup_wait<1>();
    warpgroup_fence_operand(dp);
    tile.score_gradients(dp, s, numbers(stats.softmax_d));
    Tensor ds_words = recast<uint32_t>(ds);
    pack<Element>(dp, ds_words);
    share(ds);
    QueryFragment dq;
    start_query_gradient(shared - 2, dq);
    start_sum<typename Config::MmaKeys>(ds, smem.q[0], typename Config::SmemLayoutQt{}, here.stage,
                                        sums.dk);
    warpgroup_wait<Config::kScoresFirst ? 2 : 1>();
    warpgroup_fence_operand(p);
    warpgroup_fence_operand(sums.dv);
    smem.dout_ring.release(here);
    auto const add_query_gradient = [&] {
      finish_query_gradient(block, shared - 2, !first, smem.row_visit(visits - 1), dq);
    };
    if constexpr (!Config::kScoresFirst) {
      add_query_gradient();
    }
    // Behind the last row block as well, of rows that are there: a product that is not asked for in
    // every visit alike is one that ptxas waits for at once. Not into `s`, whose factors would keep
    // its registers until here.
    bool const more = rows.more;
    ScoreFragment s_next;
    start_scores_of_keys(visits + more, s_next);
    if constexpr (Config::kScoresFirst) {
      warpgroup_wait<2>();
      add_query_gradient();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(ds);
    warpgroup_fence_operand(s_next);
    warpgroup_fence_operand(sums.dk);
    copy(s_next, s);
    smem.q_ring.release(here);
    ++visits;
    return more;
  }

  // Sᵀ of a visit's rows, not waited for
  __device__ __forceinline__ void start_scores_of_keys(uint32_t visit, ScoreFragment& s) {
    Position const at(visit);
    smem.q_ring.wait_full(at);
    start_scores(smem.k, typename Config::SmemLayoutK{}, smem.q[0], typename Config::SmemLayoutQ{},
                 at.stage, s);
  }

  __device__ RowNumbers numbers(float const* of_rows) const {
    return {of_rows, FragmentCoord<4>(thread)};
  }

  // So that the first visit has a dQ of a row block before it, too.
  __device__ __forceinline__ void share_zeros() {
    Operand zeros;
    Tensor words = recast<uint32_t>(zeros);
    clear(words);
    share(zeros);
  }

  // Sᵀ or dPᵀ (64 keys, rows), not waited for
  template <class KeyLayout, class RowLayout>
  __device__ __forceinline__ void start_scores(Element* keys, KeyLayout, Element* rows, RowLayout,
                                               int stage, ScoreFragment& to) {
    auto const slice = MmaScores{}.get_slice(0);
    Tensor all_keys = make_tensor(make_smem_ptr(keys), KeyLayout{})(_, _, 0);
    Tensor own_keys = local_tile(all_keys, make_shape(Int<kWarpgroupRows>{}, size<1>(all_keys)),
                                 make_coord(warpgroup, 0));
    Tensor all_rows = make_tensor(make_smem_ptr(rows), RowLayout{});
    start_product<false>(MmaScores{}, slice.partition_fragment_A(own_keys),
                         slice.partition_fragment_B(all_rows)(_, _, _, stage), to);
  }

  // dV += Pᵀ·dO or dK += dSᵀ·Q, not waited for
  template <class Mma, class RowLayout, class Sum>
  __device__ __forceinline__ void start_sum(Operand const& operand, Element* rows, RowLayout,
                                            int stage, Sum& to) {
    Tensor all_rows = make_tensor(make_smem_ptr(rows), RowLayout{});
    start_product<true>(Mma{}, operand,
                        Mma{}.get_slice(0).partition_fragment_B(all_rows)(_, _, _, stage), to);
  }

  // dSᵀ to shared memory, for all warpgroups' dQ.
  __device__ __forceinline__ void share(Operand const& ds) {
    ScorePosition const at(shared);
    smem.ds_ring.wait_empty(at);
    auto const copy_c = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, MmaScores{});
    auto const slice = copy_c.get_slice(thread);
    Tensor all_keys = make_tensor(make_smem_ptr(smem.ds[0]), typename Config::SmemLayoutDS{});
    Tensor target = local_tile(all_keys(_, _, at.stage), ScoreShape{}, make_coord(warpgroup, 0));
    Tensor source = make_tensor(ds.data(), typename ScoreFragment::layout_type{});
    copy(copy_c, slice.retile_S(source), slice.partition_D(target));
    smem.ds_ring.announce(at);
    ++shared;
  }

  // dQ = dS·K of the number-th dS, not waited for
  __device__ __forceinline__ void start_query_gradient(uint32_t number, QueryFragment& dq) {
    using Gradient = QueryGradient<Config>;
    ScorePosition const at(number);
    smem.ds_ring.wait_full(at);
    auto const slice = MmaQuery{}.get_slice(0);
    Tensor all_ds = make_tensor(make_smem_ptr(smem.ds[0]), typename Config::SmemLayoutDSt{});
    Tensor ds =
        local_tile(all_ds(_, _, at.stage), Shape<Int<kWarpgroupRows>, Int<Config::kBlockN>>{},
                   make_coord(Gradient::row_begin(warpgroup) / kWarpgroupRows, 0));
    Tensor all_k = make_tensor(make_smem_ptr(smem.k), typename Config::SmemLayoutKt{});
    Tensor from_column =
        domain_offset(make_coord(Gradient::column_begin(warpgroup), 0, 0), all_k)(_, _, 0);
    Tensor k = local_tile(from_column, Shape<Int<Config::kQueryColumns>, Int<Config::kBlockN>>{},
                          make_coord(0, 0));
    start_product<false>(MmaQuery{}, slice.partition_fragment_A(ds), slice.partition_fragment_B(k),
                         dq);
  }

  // dQ of the number-th dS is there. wanted: it is of a row block, that of `rows`.
  __device__ __forceinline__ void finish_query_gradient(Block const& block, uint32_t number,
                                                        bool wanted, Visit const& rows,
                                                        QueryFragment& dq) {
    warpgroup_fence_operand(dq);
    smem.ds_ring.release(ScorePosition(number));
    QueryGradient<Config> const gradient{args, smem.turns, block, warpgroup, thread};
    if constexpr (Config::kColumns) {
      if (wanted) {
        gradient.leave(dq, rows);
      }
    } else if (wanted && args.params.workspace.dq) {
      gradient.add(dq, rows.row_block, visits - 1);
    } else if (wanted && args.params.dq.ptr) {
      gradient.store(dq, rows.row_block);
    }
  }
};

}  // namespace flash::sm90
