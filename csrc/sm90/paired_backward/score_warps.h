// The warpgroup that computes the scores of a CTA's keys: P, dV and dS, which it shares with the
// rest of the pair. Of two pairs each has half of the columns, and they add up their parts of S and
// dP.
#pragma once

#include "sm90/backward/one_mod_tile.h"
#include "sm90/backward/store.h"
#include "sm90/operand.h"
#include "sm90/paired_backward/shared_storage.h"

namespace flash::sm90::backward {

template <class Config>
struct ScoreWarps {
  using Element = typename Config::Element;
  using MmaScores = typename Config::MmaScores;
  using MmaValues = typename Config::MmaValues;
  using Numbers =
      std::conditional_t<Config::kSplitsColumns, RowNumbers, RowNumbersAhead<Config::kBlockM / 4>>;
  using Block = KeyBlock<Config>;
  using ScoreShape = Shape<Int<Config::kKeys>, Int<Config::kBlockM>>;
  using ScoreFragment = decltype(partition_fragment_C(MmaScores{}, ScoreShape{}));
  // Pᵀ in registers, the A operand of dV
  using Operand =
      decltype(make_tensor<Element>(as_operand_a(typename ScoreFragment::layout_type{})));
  using ValueFragment = decltype(partition_fragment_C(
      MmaValues{}, Shape<Int<Config::kKeys>, Int<Config::kColumnsV>>{}));

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
      smem.v_ring.wait_full(RingPosition<1>(number));
      ValueFragment dv;
      clear(dv);
      iterate(block, dv);
      smem.k_ring.release(0);
      smem.v_ring.release(0);
      number = block.number + 1;  // read here: no register holds it during the tile
      store_key_rows(rows_of_dv(args.params).from(part.first_column_v()), block, part.first_key(),
                     thread, dv);
    }
  }

 private:
  __device__ __forceinline__ void iterate(Block const& block, ValueFragment& dv) {
    if constexpr (Config::kHasModLoops) {
      ScoreModKind const kind = score_mod_kind(args.params.scores);
      if (kind == ScoreModKind::Cap) {
        return iterate_each<OneModTile<ScoreModKind::Cap, Config>>(block, dv);
      }
      if (kind == ScoreModKind::Bias) {
        return iterate_each<OneModTile<ScoreModKind::Bias, Config>>(block, dv);
      }
    }
    iterate_each<ScoreTile<false, Config>, ScoreTile<true, Config>>(block, dv);
  }

  template <class Whole, class Masked = Whole>
  __device__ __forceinline__ void iterate_each(Block const& block, ValueFragment& dv) {
    constexpr bool kAlike = std::is_same_v<Whole, Masked>;
    RowRange const range = block.range;  // read here, not while products could run
    int const heads = block.heads;
    for (int head = 0; head < heads; ++head) {
#pragma unroll 1
      for (int step = 0; step < range.count(); ++step) {
        int const m_block = range.from_last(step);
        if (!kAlike && range.masked(m_block)) {
          iteration<Masked>(block, head, m_block, dv);
        } else {
          iteration<Whole>(block, head, m_block, dv);
        }
      }
    }
  }

  template <class Tile>
  __device__ __forceinline__ void iteration(Block const& block, int head, int m_block,
                                            ValueFragment& dv) {
    auto const q_at = at.q();
    auto const dout_at = at.dout();
    ScoreFragment s, dp;
    smem.q_ring.wait_full(q_at);
    start_scores(smem.k, typename Config::SmemLayoutK{}, smem.q[0], typename Config::SmemLayoutQ{},
                 q_at.stage, s);
    if constexpr (Config::kSplitsColumns) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(s);
      send_part(s, kOfS);
    }
    smem.dout_ring.wait_full(dout_at);
    start_scores(smem.v, typename Config::SmemLayoutV{}, smem.dout[0],
                 typename Config::SmemLayoutDO{}, dout_at.stage, dp);
    auto const& stats = smem.stats[q_at.stage];
    Numbers const lse(numbers(stats.lse_log2));
    if constexpr (Config::kSplitsColumns) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(dp);
      send_part(dp, kOfDP);
      add_other_part(s, kOfS);
    } else {
      warpgroup_wait<1>();
      warpgroup_fence_operand(s);
    }
    Tile tile(args, block, head, m_block, static_cast<int>(part.key_half()), thread);
    Operand p;
    Tensor p_words = recast<uint32_t>(p);
    tile.probabilities(s, p_words, lse);
    Tensor rows = make_tensor(make_smem_ptr(smem.dout[0]), typename Config::SmemLayoutDOt{});
    start_product<true>(MmaValues{}, p, operand_b<MmaValues>(rows)(_, _, _, dout_at.stage), dv);
    Numbers const softmax_d(numbers(stats.softmax_d));
    if constexpr (Config::kSplitsColumns) {
      add_other_part(dp, kOfDP);
      warpgroup_wait<0>();
      warpgroup_fence_operand(p);
      warpgroup_fence_operand(dv);
      smem.dout_ring.release_in_pair(dout_at.stage, part.pair_begin());
    } else {
      warpgroup_wait<1>();
      warpgroup_fence_operand(dp);
    }
    tile.score_gradients(dp, s, p_words, softmax_d);
    smem.q_ring.release_in_pair(q_at.stage, part.pair_begin());
    share(dp);
    if constexpr (!Config::kSplitsColumns) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(p);
      warpgroup_fence_operand(dv);
      smem.dout_ring.release_in_pair(dout_at.stage, part.pair_begin());
    }
    at.advance();
  }

  __device__ RowNumbers numbers(float const* of_rows) const {
    return {of_rows, FragmentCoord<4>(thread)};
  }

  // Sᵀ or dPᵀ (keys, rows), not waited for
  template <class KeyLayout, class RowLayout>
  __device__ __forceinline__ void start_scores(Element* keys, KeyLayout, Element* rows, RowLayout,
                                               int stage, ScoreFragment& to) {
    Tensor all_keys = make_tensor(make_smem_ptr(keys), KeyLayout{})(_, _, 0);
    Tensor all_rows = make_tensor(make_smem_ptr(rows), RowLayout{});
    start_product<false>(MmaScores{}, operand_a<MmaScores>(all_keys),
                         operand_b<MmaScores>(all_rows)(_, _, _, stage), to);
  }

  static constexpr int kOfS = 0, kOfDP = 1;

  // Sends this CTA's part of S or dP, of its columns, to the CTA with the other columns, when that
  // one has added the part of the iteration before.
  __device__ __forceinline__ void send_part(ScoreFragment const& sum, int of) {
    auto& to = smem.other_parts;
    to.ring.wait_empty(RingPosition<2>(2 * at.iterations + of));
    Barrier& full = to.ring.full(of);
    if (thread == 0) {  // for what comes here
      full.arrive_and_expect_tx(Config::kPartBytes);
    }
    BlockStores const stores(part.other_columns(), &to.numbers[of][thread], full);
    for_each(make_int_sequence<decltype(size(sum))::value / 4>{}, [&](auto i) {
      stores.store<i * kWarpgroup>(sum(4 * i), sum(4 * i + 1), sum(4 * i + 2), sum(4 * i + 3));
    });
  }

  // Adds the other CTA's part. That CTA adds the same two numbers, so both have the same scores.
  __device__ __forceinline__ void add_other_part(ScoreFragment& sum, int of) {
    auto& from = smem.other_parts;
    from.ring.wait_full(RingPosition<2>(2 * at.iterations + of));
#pragma unroll
    for (int i = 0; i < size(sum) / 4; ++i) {
      float4 const other = from.numbers[of][i * kWarpgroup + thread];
      sum(4 * i) += other.x;
      sum(4 * i + 1) += other.y;
      sum(4 * i + 2) += other.z;
      sum(4 * i + 3) += other.w;
    }
    from.ring.release_at(part.other_columns(), of);
  }

  // Writes dSᵀ in 16 bits to the shared memory of this CTA and of the other one.
  __device__ __forceinline__ void share(ScoreFragment const& gradient) {
    Operand ds;
    Tensor words = recast<uint32_t>(ds);
    pack<Element>(gradient, words);
    auto const to = at.ds();
    smem.ds_ring.wait_empty(to);
    auto const copy_c = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, MmaScores{});
    auto const slice = copy_c.get_slice(thread);
    Tensor target = make_tensor(make_smem_ptr(smem.ds[0]), typename Config::SmemLayoutDS{});
    Tensor source = make_tensor(ds.data(), typename ScoreFragment::layout_type{});
    copy(copy_c, slice.retile_S(source), slice.partition_D(target(_, _, to.stage)));
    smem.ds_ring.announce(to);
    cutlass::arch::NamedBarrier::sync(kWarpgroup, kShared);
    if (thread == 0) {
      constexpr uint32_t kBytes = Config::kTileDS * sizeof(Element);
      Barrier& full = smem.other_ds_ring.full(to.stage);
      full.arrive_and_expect_tx(kBytes, part.other_keys());
      copy_to_block(part.other_keys(), smem.ds[to.stage], smem.other_ds[to.stage], kBytes, full);
    }
  }

  static constexpr int kShared = 2;  // named barrier: all of dS is stored
};

}  // namespace flash::sm90::backward
