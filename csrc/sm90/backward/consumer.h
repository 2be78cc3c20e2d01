// A consumer warpgroup: 64 keys against the row blocks that see them.
#pragma once

#include "sm90/backward/lone_tile.h"
#include "sm90/backward/modified_tile.h"
#include "sm90/backward/query_gradient.h"
#include "sm90/backward/shared_storage.h"
#include "sm90/backward/store.h"

namespace flash::sm90::backward {

template <class Config>
struct Consumer {
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
  using NumbersAhead = RowNumbersAhead<Config::kBlockM / 4>;
  struct Nothing {};
  using LseAhead = std::conditional_t<Config::kReadsLseAhead, NumbersAhead, Nothing>;

  BackwardArgs const& args;
  SharedStorage<Config>& smem;
  int warpgroup = 0;        // among the consumers
  int thread = 0;           // of the warpgroup
  uint32_t iterations = 0;  // row blocks so far
  uint32_t shared = 0;      // dS tiles so far
  Position at{0};           // of this iteration's Q
  LseAhead lse_ahead{};     // of the next iteration's rows
  float largest = 0.f;      // largest |score| of this thread in the next iteration
  // For a stream of tiles (stream_consumer.h):
  uint32_t tiles = 0;    // tiles before this one
  KeyPosition keys{0};   // of this tile's K
  bool started = false;  // the tile before started the first scores; its last dQ is still to come
  bool crosses = false;  // this iteration starts the next tile's scores

  __device__ __forceinline__ void run() {
    find_warpgroup();
    for (uint32_t number = 0;;) {
      find_thread();
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

 protected:
  static constexpr unsigned kAll = 0xffffffffu;  // lanes

  // What an iteration does with the dQ of the row block before.
  enum class QueryEnd {
    Asked,  // what the call asks for
    Added,
    Stored,
  };

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

  // For a tile whose first scores the tile before has not started.
  __device__ __forceinline__ void start_first_scores(ScoreFragment& s) {
    smem.q_ring.wait_full(at);
    start_scores_of_keys(at, keys.stage, s);
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
  }

  // Iterates over the rows of all query heads of the GQA split, head by head.
  __device__ __forceinline__ void iterate(Block const& block, Sums& sums) {
    ScoreFragment s;
    share_zeros();
    start_first_scores(s);
    if constexpr (Config::kOwnLoopToAdd && !Config::kOrdersDq) {
      if (args.params.workspace.dq) {
        iterate_each<QueryEnd::Added>(block, sums, s);
      } else {
        iterate_each<QueryEnd::Stored>(block, sums, s);
      }
    } else if constexpr (Config::kModifiedTiles) {
      iterate_with_mods(block, sums, s);
    } else if constexpr (Config::kLoneCap) {
      if (score_mod_kind(args.params.scores) == ScoreModKind::Cap) {
        iterate_alike<LoneTile<ScoreModKind::Cap, Config>>(block, sums, s);
      } else {
        iterate_each<QueryEnd::Asked>(block, sums, s);
      }
    } else {
      iterate_each<QueryEnd::Asked>(block, sums, s);
    }
    QueryFragment dq;
    start_query_gradient(shared - 1, dq, keys.stage);
    warpgroup_wait<0>();
    finish_query_gradient<QueryEnd::Asked>(block, shared - 1, true,
                                           smem.row_iteration(iterations - 1), dq);
  }

  template <QueryEnd kEnd>
  __device__ __forceinline__ void iterate_each(Block const& block, Sums& sums, ScoreFragment& s) {
    read_lse_ahead(at);
    Progress progress{iterations_of(block, Config::kCountsIterations)};
#pragma unroll 1
    for (bool more = true; more; progress.advance()) {
      more = smem.row_iteration(iterations).masked
                 ? iteration<ScoreTile<true, Config>, kEnd>(block, progress, sums, s)
                 : iteration<ScoreTile<false, Config>, kEnd>(block, progress, sums, s);
    }
  }

  // Separate loops are 3% faster than one loop for all score mods (H200).
  __device__ __forceinline__ void iterate_with_mods(Block const& block, Sums& sums,
                                                    ScoreFragment& s) {
    switch (score_mod_kind(args.params.scores)) {
      case ScoreModKind::Cap:
        return iterate_alike<ModifiedTile<ScoreModKind::Cap, Config>>(block, sums, s);
      case ScoreModKind::Bias:
        return iterate_alike<ModifiedTile<ScoreModKind::Bias, Config>>(block, sums, s);
      case ScoreModKind::Drop:
        return iterate_alike<ModifiedTile<ScoreModKind::Drop, Config>>(block, sums, s);
      case ScoreModKind::Any:
        return iterate_alike<ModifiedTile<ScoreModKind::Any, Config>>(block, sums, s);
    }
  }

  // One loop body for masked row blocks and whole ones.
  template <class Tile>
  __device__ __forceinline__ void iterate_alike(Block const& block, Sums& sums, ScoreFragment& s) {
    if constexpr (Tile::kScansAhead) {
      largest = largest_of(s);
    }
    Progress progress{iterations_of(block, Tile::kCountsIterations)};
#pragma unroll 1
    for (bool more = true; more; progress.advance()) {
      more = iteration<Tile, QueryEnd::Asked>(block, progress, sums, s);
    }
  }

  // The number of iterations, if they are counted.
  __device__ static int iterations_of(Block const& block, bool counted) {
    return counted ? block.range.count() * block.heads : 0;
  }

  // One row block: P and dS from its scores, then dV and dK; dQ of the row block before, for which
  // all warpgroups have written dS by now, so that no consumer waits for another; and the scores of
  // the next row block, which become `s`. Returns whether there is a next.
  template <class Tile, QueryEnd kEnd>
  __device__ __forceinline__ bool iteration(Block const& block, Progress const& progress,
                                            Sums& sums, ScoreFragment& s) {
    if constexpr (!Config::kShareRows) {
      find_thread();  // with twice the rows this takes more registers than it frees
    }
    Position const here = at;
    Iteration const& rows = smem.row_iteration(iterations);
    bool more = false;
    Position next = at;
    // With the result of a vote, the compiler, too, knows that this is the same in all lanes.
    auto const look_ahead = [&](bool another) {
      more = another;
      if (more) {
        next.advance();
      }
    };
    if constexpr (Tile::kCountsIterations) {
      look_ahead(__any_sync(kAll, progress.done + 1 < progress.count));
    }
    bool late = false;  // the dQ that ends here belongs to the tile before
    if constexpr (Config::kStreamsTiles) {
      crosses = __any_sync(kAll, rows.followed);
      if (crosses) {
        next.advance();
      }
      late = started && progress.done == 0;
    }
    KeyPosition const next_keys(tiles + crosses), keys_before(tiles - late);
    auto const lse = lse_ahead;  // with lse_ahead in its place, ptxas spills 632 bytes, not 108
    ScoreFragment dp;
    DoutPosition const dout_at = dout_position();
    smem.dout_ring.wait_full(dout_at);
    start_scores(smem.v, typename Config::SmemLayoutV{}, /*key_stage=*/0, smem.dout[0],
                 SmemLayoutDO{}, dout_at.stage, dp);
    if constexpr (Tile::kStartsFirst) {
      __syncwarp();  // ptxas moves no part of a product behind it
    }
    auto const& stats = smem.stats[here.stage];
    Tile tile(args, block, rows, warpgroup, thread);
    if constexpr (Tile::kScansAhead) {
      tile.largest = largest;
    }
    bool const adds = !Config::kStreamsTiles || progress.done > 0;  // to dK and dV so far
    Operand p, ds;
    Tensor p_words = recast<uint32_t>(p);
    if constexpr (Config::kReadsLseAhead) {
      tile.probabilities(s, p_words, lse);
    } else {
      tile.probabilities(s, p_words, numbers(stats.lse_log2));
    }
    start_sum<typename Config::MmaValues>(p, smem.dout[0], SmemLayoutDOt{}, dout_at.stage, adds,
                                          sums.dv);
    using Delta = std::conditional_t<Tile::kReadsAhead, NumbersAhead, RowNumbers>;
    Delta const softmax_d(numbers(stats.softmax_d));
    warpgroup_wait<1>();
    warpgroup_fence_operand(dp);
    if (Config::kStreamsTiles && !more) {
      smem.v_ring.release(0);
    }
    if constexpr (Config::kModifiedTiles) {
      tile.score_gradients(dp, p_words, softmax_d);
    } else {
      tile.score_gradients(dp, s, softmax_d);
    }
    Tensor ds_words = recast<uint32_t>(ds);
    pack<Element>(dp, ds_words);
    share(ds);
    QueryFragment dq;
    start_query_gradient(shared - 2, dq, keys_before.stage);
    auto const start_keys = [&] {
      start_sum<typename Config::MmaKeys>(ds, smem.q[0], typename Config::SmemLayoutQt{},
                                          here.stage, adds, sums.dk);
    };
    auto const end_values = [&] {
      warpgroup_fence_operand(p);
      warpgroup_fence_operand(sums.dv);
      smem.dout_ring.release(dout_at);
    };
    if constexpr (!Tile::kScansAhead) {
      start_keys();
    }
    std::conditional_t<Tile::kReadsAhead && !Tile::kScansAhead, Iteration const, Iteration const&>
        rows_before = smem.row_iteration(iterations - 1);
    auto const end_query_gradient = [&] {
      finish_query_gradient<kEnd>(late ? smem.key_block(tiles - 1) : block, shared - 2,
                                  late || progress.has_begun(Tile::kCountsIterations), rows_before,
                                  dq);
      if (late) {
        smem.k_ring.release(keys_before);
      }
    };
    if constexpr (!Tile::kScansAhead) {
      warpgroup_wait<Config::kScoresFirst ? 2 : 1>();
      end_values();
      if constexpr (!Config::kScoresFirst) {
        end_query_gradient();
      }
    }
    // Scores are started behind the last row block as well, from rows that are in shared memory:
    // ptxas waits at once for a product that not every iteration starts. They do not go to `s`,
    // whose factors would keep its registers until here.
    if constexpr (!Tile::kCountsIterations) {
      look_ahead(rows.more);
    }
    smem.q_ring.wait_full(next);
    read_lse_ahead(next);
    ScoreFragment s_next;
    if constexpr (Tile::kScansAhead) {
      warpgroup_wait<1>();
      end_values();
      start_scores_of_keys(next, next_keys.stage, s_next);
      start_keys();
      warpgroup_wait<2>();
      end_query_gradient();
      warpgroup_wait<1>();
      warpgroup_fence_operand(s_next);
      largest = largest_of(s_next);
    } else {
      start_scores_of_keys(next, next_keys.stage, s_next);
      if constexpr (Config::kScoresFirst) {
        warpgroup_wait<2>();
        end_query_gradient();
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(ds);
    warpgroup_fence_operand(s_next);
    warpgroup_fence_operand(sums.dk);
    copy(s_next, s);
    smem.q_ring.release(here);
    ++iterations;
    at.advance();
    return more;
  }

  __device__ __forceinline__ void read_lse_ahead(Position const& rows_at) {
    if constexpr (Config::kReadsLseAhead) {
      lse_ahead = NumbersAhead(numbers(smem.stats[rows_at.stage].lse_log2));
    }
  }

  // Position of the iteration's dO: that of its Q, where dO has as many buffers.
  __device__ __forceinline__ DoutPosition dout_position() const {
    if constexpr (Config::kDoutStages == Config::kStages) {
      return at;
    } else {
      return DoutPosition(iterations);
    }
  }

  // Starts Sᵀ of an iteration's rows, which are in shared memory; not waited for
  __device__ __forceinline__ void start_scores_of_keys(Position const& rows_at, int key_stage,
                                                       ScoreFragment& s) {
    start_scores(smem.k[0], SmemLayoutK{}, key_stage, smem.q[0], typename Config::SmemLayoutQ{},
                 rows_at.stage, s);
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

  // Sᵀ or dPᵀ (64 keys, rows), not waited for
  template <class KeyLayout, class RowLayout>
  __device__ __forceinline__ void start_scores(Element* keys, KeyLayout, int key_stage,
                                               Element* rows, RowLayout, int stage,
                                               ScoreFragment& to) {
    auto const slice = MmaScores{}.get_slice(0);
    Tensor all_keys = make_tensor(make_smem_ptr(keys), KeyLayout{});
    auto const own = make_shape(Int<kWarpgroupRows>{}, size<1>(all_keys), size<2>(all_keys));
    Tensor own_keys = local_tile(all_keys, own, make_coord(warpgroup, 0, 0));
    Tensor all_rows = make_tensor(make_smem_ptr(rows), RowLayout{});
    start_product<false>(MmaScores{}, slice.partition_fragment_A(own_keys)(_, _, _, key_stage),
                         slice.partition_fragment_B(all_rows)(_, _, _, stage), to);
  }

  // dV (+)= Pᵀ·dO or dK (+)= dSᵀ·Q, not waited for
  template <class Mma, class RowLayout, class Sum>
  __device__ __forceinline__ void start_sum(Operand const& operand, Element* rows, RowLayout,
                                            int stage, bool adds, Sum& to) {
    Tensor all_rows = make_tensor(make_smem_ptr(rows), RowLayout{});
    start_product(adds, Mma{}, operand,
                  Mma{}.get_slice(0).partition_fragment_B(all_rows)(_, _, _, stage), to);
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

  // dQ = dS·K of the number-th dS, not waited for
  __device__ __forceinline__ void start_query_gradient(uint32_t number, QueryFragment& dq,
                                                       int key_stage) {
    using Gradient = QueryGradient<Config>;
    ScorePosition const at(number);
    smem.ds_ring.wait_full(at);
    auto const slice = MmaQuery{}.get_slice(0);
    Tensor all_ds = make_tensor(make_smem_ptr(smem.ds[0]), typename Config::SmemLayoutDSt{});
    Tensor ds =
        local_tile(all_ds(_, _, at.stage), Shape<Int<kWarpgroupRows>, Int<Config::kBlockN>>{},
                   make_coord(Gradient::row_begin(warpgroup) / kWarpgroupRows, 0));
    Tensor all_k = make_tensor(make_smem_ptr(smem.k[0]), SmemLayoutKt{});
    Tensor from_column = domain_offset(make_coord(Gradient::column_begin(warpgroup), 0, 0), all_k);
    Tensor k = local_tile(from_column,
                          make_shape(Int<Config::kQueryColumns>{}, size<1>(all_k), size<2>(all_k)),
                          make_coord(0, 0, 0));
    start_product<false>(MmaQuery{}, slice.partition_fragment_A(ds),
                         slice.partition_fragment_B(k)(_, _, _, key_stage), dq);
  }

  // Ends the product of the number-th dS, which was waited for. wanted: its dQ belongs to a row
  // block, that of `rows`.
  template <QueryEnd kEnd>
  __device__ __forceinline__ void finish_query_gradient(Block const& block, uint32_t number,
                                                        bool wanted, Iteration const& rows,
                                                        QueryFragment& dq) {
    warpgroup_fence_operand(dq);
    smem.ds_ring.release(ScorePosition(number));
    put_query_gradient<kEnd>(block, wanted, rows, dq);
  }

  template <QueryEnd kEnd>
  __device__ __forceinline__ void put_query_gradient(Block const& block, bool wanted,
                                                     Iteration const& rows, QueryFragment& dq) {
    QueryGradient<Config> const gradient{args, smem.dq_semaphore, block, warpgroup, thread};
    bool const adds =
        kEnd == QueryEnd::Asked ? args.params.workspace.dq != nullptr : kEnd == QueryEnd::Added;
    if constexpr (Config::kOrdersDq) {
      if (wanted) {
        gradient.leave(dq, rows, iterations - 1);
      }
    } else if (wanted && adds) {
      gradient.add(dq, rows.row_block, iterations - 1);
    } else if (wanted && kEnd != QueryEnd::Added && args.params.dq.ptr) {
      gradient.store(dq, rows.row_block);
    }
  }
};

}  // namespace flash::sm90::backward
