// What a consumer warpgroup computes with a row block, step by step: S (scores), P (probabilities),
// dV, dS, dQ and dK of its 64 keys. Steps start products and do not wait for them; the loops
// (tile_consumer.h, stream_consumer.h) order the steps, and wait.
#pragma once

#include "sm90/backward/query_gradient.h"
#include "sm90/backward/scores.h"
#include "sm90/backward/shared_storage.h"
#include "sm90/operand.h"

namespace flash::sm90::backward {

template <class Config>
struct ConsumerSteps {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  using DoutPosition = RingPosition<Config::kDoutStages>;
  using ScorePosition = RingPosition<Config::kScoreStages>;
  using KeyPosition = RingPosition<Config::kKeyStages>;
  using ValuePosition = RingPosition<1>;
  using SmemLayoutK = typename Config::template SmemLayoutK<Config::kKeyStages>;
  using SmemLayoutDO = typename Config::template SmemLayoutDO<Config::kDoutStages>;
  using SmemLayoutDOt = typename Config::template SmemLayoutDOt<Config::kDoutStages>;
  using SmemLayoutKt = typename Config::template SmemLayoutKt<Config::kKeyStages>;
  using MmaScores = typename Config::MmaScores;
  using MmaQuery = typename Config::MmaQuery;
  using ScoreShape = Shape<Int<kWarpgroupRows>, Int<Config::kBlockM>>;
  using ScoreFragment = decltype(partition_fragment_C(MmaScores{}, ScoreShape{}));
  // Pᵀ and dSᵀ in registers, the A operands of dV and dK
  using Operand =
      decltype(make_tensor<Element>(as_operand_a(typename ScoreFragment::layout_type{})));

  using QueryFragment = typename QueryGradient<Config>::Fragment;
  using Block = KeyBlock<Config>;
  using Iteration = typename SharedStorage<Config>::Iteration;
  using Sums = KeyGradients<Config>;

  BackwardArgs const& args;
  SharedStorage<Config>& smem;
  int warpgroup = 0;        // among the consumers
  int thread = 0;           // of the warpgroup
  uint32_t iterations = 0;  // row blocks so far
  uint32_t shared = 0;      // dS tiles so far
  Position at{0};           // of this iteration's Q

 protected:
  static constexpr unsigned kAll = 0xffffffffu;  // lanes

  // The thread's index, hidden from the compiler: values derived from it, if kept, would not fit
  // the registers.
  __device__ static int find_index() {
    int index = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(index));
    return index;
  }

  __device__ void find_warpgroup() {
    warpgroup = __shfl_sync(kAll, find_index() / kWarpgroup, 0) - 1;
  }
  __device__ void find_thread() { thread = find_index() % kWarpgroup; }

  // An iteration finds its thread again, but not with twice the rows, where this takes more
  // registers than it frees.
  __device__ void find_thread_again() {
    if constexpr (!Config::kShareRows) {
      find_thread();
    }
  }

  // Whether another iteration follows, and the position of its Q, or of this one's. With the result
  // of a vote, the compiler, too, knows that this is the same in all lanes. Advanced in place: a
  // function that returns it took 4 to 8% of d 64's score mods
  // (docs/lab/sm90_backward_d64_mods.md).
  struct Next {
    Position at;
    bool more = false;

    __device__ __forceinline__ void follows(bool another) {
      more = another;
      if (more) {
        at.advance();
      }
    }
  };

  // Sᵀ of the rows at a position, started
  __device__ __forceinline__ void scores(Position const& rows_at, int key_stage, ScoreFragment& s) {
    start_scores(smem.k[0], SmemLayoutK{}, key_stage, smem.q[0], typename Config::SmemLayoutQ{},
                 rows_at.stage, s);
  }

  // The first scores of a tile, waited for.
  __device__ __forceinline__ void first_scores(int key_stage, ScoreFragment& s) {
    smem.q_ring.wait_full(at);
    scores(at, key_stage, s);
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
  }

  // dPᵀ, started as soon as dO is there
  __device__ __forceinline__ void d_probabilities(DoutPosition const& dout_at, ScoreFragment& dp) {
    smem.dout_ring.wait_full(dout_at);
    start_scores(smem.v, typename Config::SmemLayoutV{}, /*key_stage=*/0, smem.dout[0],
                 SmemLayoutDO{}, dout_at.stage, dp);
  }

  // dV (+)= Pᵀ·dO, started
  __device__ __forceinline__ void d_values(Operand const& p, DoutPosition const& dout_at, bool adds,
                                           Sums& sums) {
    start_sum<typename Config::MmaValues>(p, smem.dout[0], SmemLayoutDOt{}, dout_at.stage, adds,
                                          sums.dv);
  }
  __device__ __forceinline__ void end_values(Operand& p, DoutPosition const& dout_at, Sums& sums) {
    warpgroup_fence_operand(p);
    warpgroup_fence_operand(sums.dv);
    smem.dout_ring.release(dout_at);
  }

  // dS from S and dP, which is there: in 16 bits, in registers for dK, in shared memory for all
  // warpgroups' dQ.
  template <class Tile, class Words, class Delta>
  __device__ __forceinline__ void d_scores(Tile const& tile, ScoreFragment const& s,
                                           Words const& p_words, Delta const& softmax_d,
                                           ScoreFragment& dp, Operand& ds) {
    tile.score_gradients(dp, s, p_words, softmax_d);
    Tensor ds_words = recast<uint32_t>(ds);
    pack<Element>(dp, ds_words);
    share(ds);
  }

  // dQ = dS·K of the number-th dS, started
  __device__ __forceinline__ void d_query(uint32_t number, int key_stage, QueryFragment& dq) {
    using Gradient = QueryGradient<Config>;
    ScorePosition const at(number);
    smem.ds_ring.wait_full(at);
    Tensor all_ds = make_tensor(make_smem_ptr(smem.ds[0]), typename Config::SmemLayoutDSt{});
    Tensor ds =
        local_tile(all_ds(_, _, at.stage), Shape<Int<kWarpgroupRows>, Int<Config::kBlockN>>{},
                   make_coord(Gradient::row_begin(warpgroup) / kWarpgroupRows, 0));
    Tensor all_k = make_tensor(make_smem_ptr(smem.k[0]), SmemLayoutKt{});
    Tensor from_column = domain_offset(make_coord(Gradient::column_begin(warpgroup), 0, 0), all_k);
    Tensor k = local_tile(from_column,
                          make_shape(Int<Config::kQueryColumns>{}, size<1>(all_k), size<2>(all_k)),
                          make_coord(0, 0, 0));
    start_product<false>(MmaQuery{}, operand_a<MmaQuery>(ds),
                         operand_b<MmaQuery>(k)(_, _, _, key_stage), dq);
  }

  __device__ __forceinline__ void end_query(uint32_t number, QueryFragment& dq) {
    warpgroup_fence_operand(dq);
    smem.ds_ring.release(ScorePosition(number));
  }
  __device__ QueryGradient<Config> query_gradient(Block const& block) {
    return {args, smem.dq_semaphore, block, warpgroup, thread};
  }

  // dK (+)= dSᵀ·Q, started
  __device__ __forceinline__ void d_keys(Operand const& ds, bool adds, Sums& sums) {
    start_sum<typename Config::MmaKeys>(ds, smem.q[0], typename Config::SmemLayoutQt{}, at.stage,
                                        adds, sums.dk);
  }

  // Waits for dK and the next scores, which become `s`: the last step of an iteration.
  __device__ __forceinline__ void advance(Operand& ds, ScoreFragment& s_next, Sums& sums,
                                          ScoreFragment& s) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(ds);
    warpgroup_fence_operand(s_next);
    warpgroup_fence_operand(sums.dk);
    copy(s_next, s);
    smem.q_ring.release(at);
    ++iterations;
    at.advance();
  }

  // Position of the iteration's dO: the same as its Q's, where dO has as many buffers.
  __device__ __forceinline__ DoutPosition dout_position() const {
    if constexpr (Config::kDoutStages == Config::kStages) {
      return at;
    } else {
      return DoutPosition(iterations);
    }
  }

  __device__ RowNumbers numbers(float const* of_rows) const {
    return {of_rows, FragmentCoord<4>(thread)};
  }

  // Writes zeros as dS, so that the first iteration, too, has a dQ of a row block before it.
  __device__ __forceinline__ void share_zeros() {
    Operand zeros;
    Tensor words = recast<uint32_t>(zeros);
    clear(words);
    share(zeros);
  }

 private:
  // Sᵀ or dPᵀ (64 keys, rows), started
  template <class KeyLayout, class RowLayout>
  __device__ __forceinline__ void start_scores(Element* keys, KeyLayout, int key_stage,
                                               Element* rows, RowLayout, int stage,
                                               ScoreFragment& to) {
    Tensor all_keys = make_tensor(make_smem_ptr(keys), KeyLayout{});
    auto const own = make_shape(Int<kWarpgroupRows>{}, size<1>(all_keys), size<2>(all_keys));
    Tensor own_keys = local_tile(all_keys, own, make_coord(warpgroup, 0, 0));
    Tensor all_rows = make_tensor(make_smem_ptr(rows), RowLayout{});
    start_product<false>(MmaScores{}, operand_a<MmaScores>(own_keys)(_, _, _, key_stage),
                         operand_b<MmaScores>(all_rows)(_, _, _, stage), to);
  }

  // dV (+)= Pᵀ·dO or dK (+)= dSᵀ·Q, started
  template <class Mma, class RowLayout, class Sum>
  __device__ __forceinline__ void start_sum(Operand const& operand, Element* rows, RowLayout,
                                            int stage, bool adds, Sum& to) {
    Tensor all_rows = make_tensor(make_smem_ptr(rows), RowLayout{});
    start_product(adds, Mma{}, operand, operand_b<Mma>(all_rows)(_, _, _, stage), to);
  }

  // Writes dSᵀ to shared memory, for all warpgroups' dQ: 16 rows at a time, a lane's run of 8 in
  // the 128 bytes of its key, at the one of their 8 places that the swizzle gives it. Through the
  // layout this takes 60 instructions for 64-bit addresses.
  __device__ __forceinline__ void share(Operand const& ds) {
    constexpr int kRow = 128, kRunBytes = 16;  // bytes of a key's 64 rows
    static_assert(Config::kBlockM % 64 == 0);
    ScorePosition const to(shared);
    smem.ds_ring.wait_empty(to);
    int const lane = thread % 32, key = warpgroup * kWarpgroupRows + thread / 32 * 16 + lane % 16;
    uint32_t const first = key * kRow + (lane / 16 ^ key % 8) * kRunBytes;
    char* const tile = reinterpret_cast<char*>(smem.ds[to.stage]);
    Tensor all_words = recast<uint32_t>(ds);
#pragma unroll
    for (int i = 0; i < Config::kBlockM / 16; ++i) {
      uint32_t const offset = (first ^ i % 4 * 2 * kRunBytes) + i / 4 * (Config::kBlockN * kRow);
      auto const words = all_words.data() + 4 * i;
      SM90_U32x4_STSM_N::copy(words[0], words[1], words[2], words[3],
                              *reinterpret_cast<uint128_t*>(tile + offset));
    }
    smem.ds_ring.announce(to);
    ++shared;
  }
};

}  // namespace flash::sm90::backward
