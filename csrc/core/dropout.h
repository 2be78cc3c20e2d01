// Which attention probabilities dropout keeps: a pure function of (seed, offset, batch, head,
// query, key), so that every kernel and the CPU backend drop the same entries whatever their tiles
// are.
#pragma once

#include <cmath>

#include "core/philox.h"
#include "params/scores.h"

namespace flash {

// One Philox call draws sixteen bits for each of eight entries, an octet. In a 16 x 16 block of
// scores (queries x keys) an octet is what one thread of mma.m16n8k16, and of wgmma, holds in two
// neighbouring accumulators: rows r, r + 8 and columns c, c + 1, c + 8, c + 9 with r < 8 and c in
// {0, 2, 4, 6}. Hence the forward kernel draws each bit once, without a shuffle.
struct DropoutOctet {
  uint32_t row;
  uint32_t col;

  // The octet at the same place of the 16 x 16 block so many blocks down and to the right.
  FLASH_HD DropoutOctet later(int block_rows, int block_cols) const {
    return {row + 8u * block_rows, col + 4u * block_cols};
  }
};

FLASH_HD DropoutOctet dropout_octet(int query, int key) {
  uint32_t const i = uint32_t(query);
  uint32_t const j = uint32_t(key);
  return {(i >> 4) * 8 + (i & 7), (j >> 4) * 4 + ((j & 7) >> 1)};
}

// Position in the octet; the two accumulators of one thread hold the entries in this order.
FLASH_HD int dropout_bit(int query, int key) {
  return (key & 1) + 2 * ((query >> 3) & 1) + 4 * ((key >> 3) & 1);
}

// One more would drop everything.
constexpr uint32_t kMaxDropoutThreshold = 65535;

// Entries whose sixteen bits are at least this are kept. Rounded half to even, as in Python.
FLASH_HD uint32_t dropout_threshold(double dropout_p) {
  double const threshold = nearbyint(dropout_p * 65536.0);
  return threshold < kMaxDropoutThreshold ? uint32_t(threshold) : kMaxDropoutThreshold;
}

// The exact rate of entries that a threshold drops. Kept entries are scaled by 1 / (1 - this rate):
// with the probability asked for instead, the mean would be off by up to 2^-17 / (1 - p).
FLASH_HD float dropout_rate(uint32_t threshold) { return float(threshold) / 65536.f; }

// A probability becomes 0 where `random` is below `threshold`. Comparisons and selections limit
// dropout on Hopper, so a predicated multiplication, skipped for kept entries, replaces the
// selection there.
FLASH_HD void drop_below(uint32_t threshold, uint32_t random, float& p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("{ .reg .pred below; setp.lt.u32 below, %1, %2; @below mul.f32 %0, %0, 0f00000000; }"
      : "+f"(p)
      : "r"(random), "r"(threshold));
#else
  p = random < threshold ? 0.f : p;
#endif
}

struct DropoutMask {
  PhiloxKey key;
  uint32_t batch_head;
  uint32_t offset_low;
  uint32_t threshold;
  DropoutOctet first;  // of this call, in the whole matrix that the call is a part of

  DropoutMask() = default;

  // rng_state = (seed, offset). batch is the sequence of a varlen batch, head a query head.
  FLASH_HD DropoutMask(int64_t seed, int64_t offset, int batch, int heads_q, int head,
                       uint32_t threshold_)
      : key{{uint32_t(seed), uint32_t(uint64_t(seed) >> 32) ^ uint32_t(uint64_t(offset) >> 32)}},
        batch_head(uint32_t(batch) * uint32_t(heads_q) + uint32_t(head)),
        offset_low(uint32_t(offset)),
        threshold(threshold_),
        first{} {}

  // Reads the generator's state, which the host never sees: a graph replays with a new one.
  FLASH_HD DropoutMask(Scores const& s, int batch, int heads_q, int head)
      : DropoutMask(s.rng_state[0], s.rng_state[1], batch, heads_q, head, s.dropout_threshold) {
    if (s.dropout_origins) {
      DropoutOrigin const& origin = s.dropout_origins[batch];
      batch_head = uint32_t(origin.batch_head) + uint32_t(head);
      first = dropout_octet(int(origin.query), int(origin.key));
    }
  }

  // The octet of an entry of this call.
  FLASH_HD DropoutOctet octet(int query, int key_index) const {
    DropoutOctet const own = dropout_octet(query, key_index);
    return {first.row + own.row, first.col + own.col};
  }

  // Sixteen bits for each entry of an octet, in dropout_bit's order, two entries to a word. kWide:
  // with wide products (philox.h).
  template <bool kWide = false>
  FLASH_HD PhiloxWords draw(DropoutOctet octet) const {
    return philox<7, kWide>(key, {{octet.row, octet.col, batch_head, offset_low}});
  }

  // The eight keep bits of an octet, in dropout_bit's order.
  FLASH_HD uint32_t keep_bits(DropoutOctet octet) const {
    PhiloxWords const random = draw(octet);
    uint32_t bits = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      bits |= uint32_t((random.word[w] & 0xffffu) >= threshold) << (2 * w);
      bits |= uint32_t((random.word[w] >> 16) >= threshold) << (2 * w + 1);
    }
    return bits;
  }

  // The same by the key's parity, for a thread that holds every second key: entry (query, key) is
  // bit first + 2 * (key >> 3 & 1) + 4 * (query >> 3 & 1) of kept[key & 1], which is 0 before.
  template <bool kWide = false>
  FLASH_HD void keep_by_parity(DropoutOctet octet, int first, uint32_t (&kept)[2]) const {
    PhiloxWords const random = draw<kWide>(octet);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t const bit = 1u << (first + w / 2 * 2 + w % 2 * 4);
      kept[0] |= random.word[w] << 16 >= threshold << 16 ? bit : 0;
      kept[1] |= random.word[w] >= threshold << 16 ? bit : 0;
    }
  }

  // Drops the two entries of an octet, in dropout_bit's order, whose bits are a word's halves. Both
  // halves are compared as upper ones.
  FLASH_HD void drop(uint32_t word, float& lower, float& upper) const {
    drop_below(threshold << 16, word << 16, lower);
    drop_below(threshold << 16, word, upper);
  }

  FLASH_HD bool keep(int query, int key_index) const {
    uint32_t const bits = keep_bits(octet(query, key_index));
    return (bits >> dropout_bit(query, key_index)) & 1;
  }
};

// Kernels that compute the transposed scores (keys x queries) hold, in two neighbouring
// accumulators of a 16 x 16 block, keys r, r + 8 and queries c, c + 1, c + 8, c + 9: half of the
// octet of query c and half of the one of query c + 1. The lane four away holds the other halves,
// so each of the two draws one octet, and they swap what the other holds with one shuffle.
struct TransposedDropout {
  int lane;

  FLASH_HD int partner() const { return lane ^ 4; }

  // The query, and a key, of the octet that this lane draws; relative to the block.
  FLASH_HD int query() const { return 2 * (lane & 3) + odd_key(); }
  FLASH_HD int key() const { return lane >> 2; }

  // The bits by the key's parity that the partner needs.
  FLASH_HD uint32_t for_partner(uint32_t const (&kept)[2]) const { return kept[1 - odd_key()]; }

  // The lane's keep bits, in the order of its accumulators: bit
  // (query & 1) + 2 * (key >> 3) + 4 * (query >> 3), relative to the block.
  FLASH_HD uint32_t keep_bits(uint32_t const (&kept)[2], uint32_t from_partner) const {
    return kept[odd_key()] << odd_key() | from_partner << (1 - odd_key());
  }

  FLASH_HD int odd_key() const { return (lane >> 2) & 1; }
};

// Four of the eight bytes of a and b. Four bits of the selector name each: three are its number,
// and the highest asks for the byte's sign in all of its bits.
FLASH_HD uint32_t permuted_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(selector));
  return x;
#else
  uint32_t x = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t const name = selector >> 4 * i & 0xf;
    uint32_t const byte = uint32_t((uint64_t{b} << 32 | a) >> 8 * (name & 7)) & 0xff;
    x |= (name & 8 ? (byte & 0x80 ? 0xffu : 0) : byte) << 8 * i;
  }
  return x;
#endif
}

// One bit of each of two words as masks of a word's halves: the bit is moved to its byte's sign.
FLASH_HD uint32_t halves_of_bit(uint32_t lower, uint32_t upper, int bit) {
  int const byte = bit / 8, place = bit % 8;
  return permuted_bytes(lower << (7 - place), upper << (7 - place), 0xcc88 + byte * 0x1111);
}

// Two neighbouring bits, in one byte, as such masks.
FLASH_HD uint32_t halves_of_bits(uint32_t bits, int first) {
  int const byte = first / 8, place = first % 8;
  return permuted_bytes(bits << (7 - place), bits << (6 - place), 0xcc88 + byte * 0x1111);
}

// Which of a word's halves are below a threshold, as masks of the halves. Two instructions do both:
// min(half, threshold) - threshold is 0 or negative, and is cut off at -1.
struct HalvesBelow {
  static constexpr uint32_t kLargest = 0x8000;  // above it a difference overflows int16

  uint32_t thresholds;
  uint32_t negatives;

  FLASH_HD explicit HalvesBelow(uint32_t threshold)
      : thresholds(threshold * 0x10001), negatives((-threshold & 0xffff) * 0x10001) {}

  FLASH_HD uint32_t operator()(uint32_t word) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return __viaddmax_s16x2(__vminu2(word, thresholds), negatives, 0xffffffff);
#else
    return one(word) | one(word >> 16) << 16;
#endif
  }

 private:
  FLASH_HD uint32_t one(uint32_t half) const {
    uint32_t const own = half & 0xffff, threshold = thresholds & 0xffff;
    auto const difference = static_cast<int16_t>((own < threshold ? own : threshold) + negatives);
    return difference < 0 ? 0xffff : 0;
  }
};

}  // namespace flash
