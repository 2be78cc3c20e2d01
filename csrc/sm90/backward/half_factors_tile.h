// Scores with score mods, of 128 rows at once. A thread has 64 of them, whose factors of dS would
// be 64 registers beside P and dP: here they have 16 bits each.
#pragma once

#include "sm90/backward/scores.h"

namespace flash::sm90::backward {

// One bit for each of a thread's transposed scores (2 keys, 32 queries), in blocks of 16 queries.
struct DroppedPairs {
  static constexpr int kBlocks = 8;

  // Bits of the even queries, and of the odd ones. Bit 4 * block + 2 * (key >> 3) + (query >> 3),
  // in the order in which words are drawn.
  uint32_t even, odd;

  // first: the octet that the lane draws for the first block. A lane draws a query's bits for two
  // keys, its own and its partner's; of a word's halves it keeps those of its own key.
  __device__ __forceinline__ DroppedPairs(DropoutMask const& mask, DropoutOctet first,
                                          TransposedDropout lane) {
    uint32_t const kLower = 0x5410, kUpper = 0x7632;  // halves, of two words
    HalvesBelow const below(mask.threshold);
    uint32_t drawn[2] = {0, 0};  // of four blocks each, halves by the key's parity
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      PhiloxWords const random = mask.draw<true>(first.later(block, 0));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        drawn[block / 4] |= below(random.word[w]) & (0x10001u << (block % 4 * 4 + w));
      }
    }
    bool const odd_key = lane.odd_key();
    uint32_t const own = permuted_bytes(drawn[0], drawn[1], odd_key ? kUpper : kLower);
    uint32_t const others = permuted_bytes(drawn[0], drawn[1], odd_key ? kLower : kUpper);
    uint32_t const partners = __shfl_xor_sync(0xffffffffu, others, 4);
    even = odd_key ? partners : own;
    odd = odd_key ? own : partners;
  }

  // Calls drop(r, c, halves), where halves masks those of entries (r, c) and (r, c + 1) that are
  // dropped.
  template <class Drop>
  __device__ __forceinline__ void for_each_pair(Drop drop) const {
#pragma unroll
    for (int bit = 0; bit < 4 * kBlocks; ++bit) {
      drop(bit / 2 % 2, bit / 4 * 4 + bit % 2 * 2, halves_of_bit(even, odd, bit));
    }
  }
};

// Sets a and b to 0 where a word's halves are 0, by selections, which the compiler may not move
// after a multiplication.
template <class Element>
__device__ __forceinline__ void clear_where_zero(uint32_t word, float& a, float& b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    asm("{ .reg .pred p, q; setp.neu.bf16x2 p|q, %2, %3; selp.f32 %0, %0, 0f00000000, p; "
        "selp.f32 %1, %1, 0f00000000, q; }"
        : "+f"(a), "+f"(b)
        : "r"(word), "r"(0));
  } else {
    asm("{ .reg .pred p, q; setp.neu.f16x2 p|q, %2, %3; selp.f32 %0, %0, 0f00000000, p; "
        "selp.f32 %1, %1, 0f00000000, q; }"
        : "+f"(a), "+f"(b)
        : "r"(word), "r"(0));
  }
#else
  a = word & 0x7fff ? a : 0.f;
  b = word & 0x7fff0000 ? b : 0.f;
#endif
}

// Like ScoreTile, but with its own factors, and with one body of an iteration for masked row blocks
// and whole ones: only the loops of the score mods exist twice.
template <ScoreModKind kKind, class Config>
struct HalfFactorsTile : ScoreTile<false, Config> {
  using Base = ScoreTile<false, Config>;
  using Element = typename Config::Element;
  using Factor = cutlass::half_t;
  using CapLoop = typename Config::CapLoop;
  static constexpr bool kCap = kKind == ScoreModKind::Cap;
  static constexpr bool kCountsIterations = kCap && CapLoop::kCountsIterations;
  static constexpr bool kReadsAhead = kCap && CapLoop::kReadsAhead;

  NearTanhMod const& near_tanh;
  bool masked;                            // a limit cuts through the row block
  uint32_t factors[Config::kBlockM / 4];  // pairs, in units of P

  __device__ HalfFactorsTile(BackwardArgs const& args, KeyBlock<Config> const& block,
                             RowIteration const& rows, int warpgroup, int thread)
      : Base(args, block, rows, warpgroup, thread),
        near_tanh(args.near_tanh),
        masked(rows.masked) {}

  // Writes the probabilities by which the values are multiplied to `operand`, in 16 bits and units.
  template <class Scores, class Words, class Lse>
  __device__ __forceinline__ void probabilities(Scores const& s, Words& operand, Lse const& lse) {
    if (masked) {
      apply_score_mods<true>(s, operand, lse);
    } else {
      apply_score_mods<false>(s, operand, lse);
    }
    if constexpr (kKind == ScoreModKind::Drop) {
      drop_pairs(s, operand);
    } else if (drops()) {
      Base::drop(s, operand);
    }
  }

  // dP → dS / softmax_scale, in place. Under dropout both are (1 - dropout_p) times that. D comes
  // divided by the unit of P.
  template <class Gradient, class Scores, class Words, class Delta>
  __device__ __forceinline__ void score_gradients(Gradient& dp_mma, Scores const& /*s*/,
                                                  Words const& operand,
                                                  Delta const& softmax_d) const {
    constexpr float kInverse = 1.f / Config::kProbabilityUnit;
    Tensor dp = make_tensor(dp_mma.data(), rows_and_columns(dp_mma.layout()));
    if (kKind == ScoreModKind::Any && drops()) {
      this->keep.apply(dp);
    }
    Base::for_each_pair([&](int r, int c) {
      int const word = dp.layout()(r, c) / 2;
      float2 const delta = softmax_d(c), factor = factors_of(word);
      float a = dp(r, c), b = dp(r, c + 1);
      if constexpr (kKind == ScoreModKind::Drop) {
        // An entry that is 0 without having been dropped has a factor of 0, too.
        clear_where_zero<Element>(operand.data()[word], a, b);
      }
      dp(r, c) = (a * kInverse - delta.x) * factor.x;
      dp(r, c + 1) = (b * kInverse - delta.y) * factor.y;
    });
  }

 private:
  template <class Scores, class Words>
  __device__ __forceinline__ void drop_pairs(Scores const& s_mma, Words& operand) const {
    static_assert(Base::kColumns == 4 * DroppedPairs::kBlocks);
    auto const layout = rows_and_columns(s_mma.layout());
    DropoutMask mask = this->block.dropout;
    mask.batch_head += this->head - this->block.head_begin;
    TransposedDropout const lane{static_cast<int>(threadIdx.x % 32)};
    DropoutOctet const first =
        mask.octet((this->row_begin + this->coord.col(0)) / 16 * 16 + lane.query(),
                   (this->key_begin + this->coord.row(0)) / 16 * 16 + lane.key());
    DroppedPairs const dropped(mask, first, lane);
    dropped.for_each_pair(
        [&](int r, int c, uint32_t halves) { operand.data()[layout(r, c) / 2] &= ~halves; });
  }

  __device__ bool drops() const {
    return kKind == ScoreModKind::Any ? Base::drops() : kKind == ScoreModKind::Drop;
  }

  __device__ float2 factors_of(int word) const {
    cutlass::NumericArrayConverter<float, Factor, 2> const converter;
    auto const pair = converter(reinterpret_cast<cutlass::Array<Factor, 2> const&>(factors[word]));
    return {pair[0], pair[1]};
  }

  template <bool kMasked, class Scores, class Words, class Lse>
  __device__ __forceinline__ void apply_score_mods(Scores const& s, Words& operand,
                                                   Lse const& lse) {
    ScoreMod const mod = Base::score_mod();
    bool const caps = kKind == ScoreModKind::Any ? mod.softcap > 0.f : kCap;
    bool const biased =
        kKind == ScoreModKind::Any ? mod.alibi_slope != 0.f : kKind == ScoreModKind::Bias;
    auto const exponentiate = [&](auto const& mod) {
      this->template exponentiate<kMasked>(s, operand, lse, mod);
    };
    if (caps && biased) {
      float const double_scale_log2 =
          2.f * mod.softmax_scale * kLog2e * reciprocal_fast(mod.softcap);
      TransposedBias const bias(mod, this->row_begin + this->coord.col(0),
                                this->key_begin + this->coord.row(0));
      exponentiate(CapMod{double_scale_log2, bias.sign * mod.softcap * kLog2e, bias});
    } else if (caps) {
      cap_in_parts<kMasked, kCap ? 2 : 1>(mod, s, operand, lse);
    } else if (biased) {
      with_bias<kMasked>(mod, this->row_begin, this->key_begin, this->coord, exponentiate);
    } else {
      exponentiate(ScaleMod{mod.softmax_scale * kLog2e});
    }
  }

  // Caps the columns in parts, each with the tanh that it needs: the first part's exponentials
  // begin sooner. Rate of a softcap alone over plain (4k causal, H200): 0.748 whole, 0.795 in
  // halves, 0.739 in quarters.
  template <bool kMasked, int kParts, class Scores, class Words, class Lse>
  __device__ __forceinline__ void cap_in_parts(ScoreMod const& mod, Scores const& s_mma,
                                               Words& operand, Lse const& lse) {
    constexpr int kPart = Base::kColumns / kParts;
    Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
    for_each(make_int_sequence<kParts>{}, [&](auto part) {
      constexpr int kBegin = part * kPart;
      Tensor own = local_tile(s, Shape<Int<Base::kRows>, Int<kPart>>{}, make_coord(0, part));
      with_tanh(mod, near_tanh, largest_of(own), [&](auto const& mod) {
        this->template exponentiate<kMasked, kBegin, kBegin + kPart>(s_mma, operand, lse, mod);
      });
    });
  }

  template <bool kMasked, int kBegin = 0, int kEnd = Base::kColumns, class Scores, class Words,
            class Lse, class Mod>
  __device__ __forceinline__ void exponentiate(Scores const& s_mma, Words& operand,
                                               Lse const& lse_log2, Mod const& mod) {
    Tensor s = make_tensor(s_mma.data(), rows_and_columns(s_mma.layout()));
    Base::template for_each_pair<kBegin, kEnd>([&](int r, int c) {
      float2 const lse = lse_log2(c);
      ModifiedScore const a = mod(s(r, c), Base::template seen<kMasked>(lse.x, r, c), r, c);
      ModifiedScore const b =
          mod(s(r, c + 1), Base::template seen<kMasked>(lse.y, r, c + 1), r, c + 1);
      float const pa = exp2_fast(a.log2), pb = exp2_fast(b.log2);
      int const word = s.layout()(r, c) / 2;
      operand.data()[word] = pack_pair<Element>(pa, pb);
      factors[word] = pack_pair<Factor>(pa * a.slope, pb * b.slope);
    });
  }
};

}  // namespace flash::sm90::backward
