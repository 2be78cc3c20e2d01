// A consumer warpgroup whose products take Q, K, V and P as codes (e4m3).
//
// A code has 4 significant bits, and the tensor core keeps about 13 of a sum, relative to the
// largest number that it adds. So P has a scale of its own in each row and KV block, by which its
// largest number is 256: a block loses no more where another one has larger scores. And P·V of a
// block begins at 0, and is added to O in fp32, times the weight of the row in the block.
#pragma once

#include "sm90/forward/consumer.h"
#include "sm90/operand.h"

namespace flash::sm90::forward {

template <class Config>
struct Fp8Consumer : Consumer<Config> {
  using Base = Consumer<Config>;
  using Base::args, Base::smem, Base::warpgroup, Base::thread, Base::blocks;
  using typename Base::Acc;
  using typename Base::Position;
  using typename Base::ScoreFragment;
  using typename Base::Visible;
  static constexpr int kRows = Acc::kRows, kColumns = Base::kColumns;  // of scores, a thread

  // P·V is added to O by so many columns at a time.
  using MmaPart = typename Config::MmaValues;
  using PartShape = Shape<Int<kWarpgroupRows>, Int<Config::kPartColumns>>;
  using Part = decltype(partition_fragment_C(MmaPart{}, PartShape{}));
  static constexpr int kParts = Config::kHeadDimV / Config::kPartColumns;
  // ((4 keys, 2 rows, 2), 1, keys / 32): 16 keys are four of each thread (transposer.h)
  using Probabilities = decltype(make_tensor<float_e4m3_t>(
      Shape<Shape<_4, _2, _2>, _1, Int<Config::kBlockN / 32>>{}));

  // As Consumer's, but that tiles are stored at once.
  __device__ __forceinline__ void run() {
    Base::set_thread_and_warpgroup();
    if constexpr (kPingPong) {
      Base::ping_pong().begin();
    }
    for (uint32_t number = 0;;) {
      Base::set_thread_and_warpgroup();
      smem.q_ring[warpgroup].wait_full(RingPosition<1>(number));
      RowBlock<Config> const& block = smem.row_block(number);
      if (!block.tile.valid) {
        break;
      }
      Acc acc(Config::kScores == ScoreLevel::Plain ? block.score_mod.softmax_scale
                                                   : block.score_mod.exponent_scale());
      attend_with_score_mods(block, acc);
      number = block.number + 1;
      finish_rows<Config>(args, block, smem, warpgroup, thread, acc);
      acc.rescale(acc.scale);
      if constexpr (Config::kStoresTiles) {
        store_tile<Config>(args, block, smem.out[warpgroup], warpgroup, thread, acc);
      }
      if constexpr (Config::kTileColumns < Config::kHeadDimV) {
        store<Config>(args, block, warpgroup, thread, acc);
      }
    }
    if constexpr (Config::kStoresTiles) {
      tma_store_wait<0>();  // a CTA's shared memory has to stay until its stores have read it
    }
    if constexpr (kPingPong) {
      Base::ping_pong().end();
    }
  }

 private:
  // Whether one warpgroup after the other starts P·V of a block and Q·Kᵀ of the next. H200, 8k
  // keys, TFLOP/s: d 256 1,098, without ping-pong 1,113; d 64 and 128 alike.
  static constexpr bool kPingPong = Config::kHeadDimV < 256;
  __device__ void wait_ping_pong() const {
    if constexpr (kPingPong) {
      Base::ping_pong().wait();
    }
  }
  __device__ void pass_ping_pong() const {
    if constexpr (kPingPong) {
      Base::ping_pong().pass();
    }
  }

  __device__ __forceinline__ void attend_with_score_mods(RowBlock<Config> const& block, Acc& acc) {
    if constexpr (Config::kScores == ScoreLevel::Plain) {
      attend(block, NoScoreMods{}, acc);
    } else {
      attend(block, AnyScoreMods<Config>{block, warpgroup}, acc);
    }
  }

  // The factors of a row in a KV block: of its scaled probabilities, and, if its maximum moved, of
  // its sum and O so far.
  struct RowScales {
    float weight[kRows], factor[kRows];
  };

  // What the steps of a row block share.
  template <class ScoreMods_>
  struct Work {
    using ScoreMods = ScoreMods_;
    RowBlock<Config> const& block;
    ScoreMods const& score_mods;
    Acc& acc;
    RowScales& scales;
  };

  template <class ScoreMods>
  __device__ __forceinline__ void attend(RowBlock<Config> const& block, ScoreMods const& score_mods,
                                         Acc& acc) {
    int const steps = block.range.count();
    int i = Base::unseen_steps(block);
    Base::template leave_out_first<kPingPong>(i);
    // One more time than there are steps, also in a warpgroup that sees nothing.
    wait_ping_pong();
    if (i < steps) {
      RowScales scales;
      Work<ScoreMods> const work{block, score_mods, acc, scales};
      for (; i < block.masked_steps; ++i) {
        step<true>(work, block.range.block_at(i), i);
      }
      int const interior = block.range.interior();
      for (; i < steps; ++i) {
        step<false>(work, interior - i, i);
      }
    } else {
      smem.q_ring[warpgroup].release(0);
    }
    pass_ping_pong();
    blocks += steps;
  }

  // Q·Kᵀ of a block, the softmax, and P·V. Other warpgroups compute meanwhile: with a softmax under
  // the warpgroup's own products there would be registers for half as many keys.
  template <bool kMasked, class Work>
  __device__ __forceinline__ void step(Work const& work, int key_block, int step) {
    Position const here(blocks + step);
    ScoreFragment s;
    smem.k_ring.wait_full(here);
    Base::start_scores(here, s);
    Visible seen[kRows];
    if constexpr (kMasked) {
      Base::find_visible(work.block, here, key_block, seen);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    pass_ping_pong();
    Base::release_k(step, work.block.range.count());
    // The same registers, as one product or more has them.
    using OfScores = Layout<Shape<Shape<_2, _2, Int<Config::kBlockN / 8>>, _1, _1>>;
    Tensor scores = make_tensor(s.data(), rows_and_columns(OfScores{}));
    if (softmax<kMasked>(work, key_block, seen, scores)) {
      work.acc.rescale(work.scales.factor);
    }
    Probabilities p;
    to_operand(scores, p);
    smem.v_ring.wait_full(here);
    wait_ping_pong();
    for_each(make_int_sequence<kParts>{}, [&](auto i) { add_part(work, here, i, p); });
    smem.v_ring.release(here);
  }

  // Adds a part of P·V to O.
  template <class Work>
  __device__ __forceinline__ void add_part(Work const& work, Position at, int i,
                                           Probabilities const& p) {
    Tensor v = make_tensor(make_smem_ptr(smem.v[0]), typename Config::SmemLayoutV{});
    using OfPart = Shape<Int<Config::kPartColumns>, Int<Config::kBlockN>>;
    Tensor columns = local_tile(v(_, _, at.stage), OfPart{}, make_coord(i, 0));
    Part part;
    start_product<false>(MmaPart{}, p, operand_b<MmaPart>(columns), part);
    warpgroup_wait<0>();
    warpgroup_fence_operand(part);
    constexpr int kNumbers = decltype(size(part))::value;
    Tensor sums = make_tensor(part.data(), rows_and_columns(part.layout()));
    Tensor out = make_tensor(work.acc.out.data() + i * kNumbers, sums.layout());
#pragma unroll
    for (int c = 0; c < size<1>(sums); ++c) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        out(r, c) += work.scales.weight[r] * sums(r, c);
      }
    }
  }

  static constexpr float kLargestLog2 = 8.f;  // of P; the largest code is 448

  // Scores of a block become scaled probabilities. Returns whether a row's maximum
  // moved, the same in a whole warp.
  template <bool kMasked, class Work, class Scores>
  __device__ __forceinline__ bool softmax(Work const& work, int key_block,
                                          Visible const (&seen)[kRows], Scores& s) {
    auto& softmax = work.acc.softmax;
    typename Work::ScoreMods::Offsets offsets{};
    work.score_mods.on_scores(s, key_block * Config::kBlockN, Coord(thread), offsets);
    if constexpr (kMasked) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        seen[r].hide_others(s, r);
      }
    }
    float tops[kRows];
    find_tops(s, offsets, tops);
    bool moved = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      moved |= softmax.raise_to(r, tops[r], work.scales.factor[r]);
      float const top = offsets.take_away(r, fmaxf(tops[r], softmax.no_key()));
      float const exponent = top * softmax.scale_log2 - kLargestLog2;
      // A multiplication and a subtraction may be one instruction, and then what is left of a row
      // that has seen no key yet is what its huge numbers were rounded by, not 0.
      float const power = exponent - offsets.take_away(r, softmax.max[r]) * softmax.scale_log2;
      work.scales.weight[r] = exp2_fast(fminf(power, kLargestLog2));
      float sums[2] = {};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float const p = exp2_fast(s(r, c) * softmax.scale_log2 - exponent);
        s(r, c) = p;
        sums[c % 2] += p;
      }
      softmax.sum[r] =
          softmax.sum[r] * work.scales.factor[r] + work.scales.weight[r] * (sums[0] + sums[1]);
    }
    return __any_sync(Base::kAll, moved);
  }

  // The largest score of each row.
  template <class Scores>
  __device__ __forceinline__ static void find_tops(Scores const& s,
                                                   RowOffsets<kRows> const& offsets,
                                                   float (&tops)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float const own = OnlineSoftmax<kRows>::template largest<kColumns>(r, s);
      tops[r] = QuadReduce{}(offsets.add(r, own), Max{});
    }
  }

  // One instruction compares two more scores, as integers, in whose order negative ones are not:
  // rows without a positive one are looked at again.
  template <class Scores>
  __device__ __forceinline__ static void find_tops(Scores const& s, NoOffsets,
                                                   float (&tops)[kRows]) {
    bool positive = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      int const own = OnlineSoftmax<kRows>::template top_bits<kColumns>(r, s, 0);
      tops[r] = QuadReduce{}(from_bits_ordered_from_zero(own), Max{});
      positive = positive && tops[r] > 0.f;
    }
    if (!__all_sync(Base::kAll, positive)) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        tops[r] = QuadReduce{}(OnlineSoftmax<kRows>::template largest<kColumns>(r, s), Max{});
      }
    }
  }

  template <class Scores>
  __device__ __forceinline__ static void to_operand(Scores const& s, Probabilities& p) {
    Tensor words = recast<uint32_t>(p);  // ((1, 2 rows, 2), 1, keys / 32)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int four = 0; four < kColumns / 4; ++four) {
        int const c = 4 * four;
        words(four / 2 * 4 + four % 2 * 2 + r) =
            pack_four(s(r, c), s(r, c + 1), s(r, c + 2), s(r, c + 3));
      }
    }
  }

  __device__ static uint32_t pack_four(float a, float b, float c, float d) {
    cutlass::NumericArrayConverter<float_e4m3_t, float, 4> const converter;
    auto const codes = converter(cutlass::Array<float, 4>{a, b, c, d});
    return reinterpret_cast<uint32_t const&>(codes);
  }
};

}  // namespace flash::sm90::forward
