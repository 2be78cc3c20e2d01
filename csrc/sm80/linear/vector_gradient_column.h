// The last step of dQ and dK: a thread's column of K of 16 tokens, from the states' sums and the
// products of the step's own tokens, with the gates' gradient.
#pragma once

#include "sm80/linear/vector_gradients_config.h"

namespace flash::sm80::linear {

// Sums of pairs of the step's tokens are fp32 throughout, because a gate's gradient is made of
// those that cross its token, which may be far smaller than the others.
template <class C>
struct GradientColumn {
  using Element = typename C::Element;
  static constexpr int kOwn = C::kOwn;

  VectorGradientsParams const& p;
  Walk<C> const& walk;
  VectorGradientsStorage<C> const& smem;
  typename VectorGradientsStorage<C>::Keys const& keys;  // the chunk's
  OwnColumn<C> const own;
  flash::linear::Tokens const tokens;

  __device__ void finish() const {
    ColumnSums<C> const sums(keys.g[own.head], forward().gate.fp32, own);
    // What the step's tokens give each other, and what states give.
    float of_pairs[kOwn], of_states[kOwn], crossing[16] = {};
    if (sums.all() >= kLeastSum) {
      add_pairs<false>(sums, of_pairs, crossing);
    } else {
      add_pairs<true>(sums, of_pairs, crossing);
    }
    // dQ's part of dg is on its way while the rest is computed.
    float earlier[kOwn] = {};
    if (C::kReverse && p.dg) {
      float const* const from = first_of(p.dg);
      for_tokens([&](int n) { earlier[n] = __ldcg(from + n * step()); });
    }
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      float sum = 0.f;
#pragma unroll
      for (int part = 0; part < C::kWarpsV; ++part) {
        sum += smem.sums[own.head][part][own.row(own.token(n))][own.column];
      }
      of_states[n] = sum * (p.walk.scale.reads * sums.reading(own.pick(sums.until, n)));
    }
    if (p.dg) {
      add_to_gates(sums, of_states, crossing, earlier);
    }
    store(of_states, of_pairs);
  }

 private:
  __device__ ForwardParams const& forward() const { return p.walk.forward; }
  __device__ float own_number(int n) const {
    return static_cast<float>(keys.own[own.head][own.at_own(n)]);
  }

  // Σ over the tokens whose numbers have entered, of pairs' products times what entered and its
  // decays. kExact: an exponential for each pair, whose exponent is a difference of sums; else they
  // are products of e^G and e^-G, half of whose range (kKeyShift) goes to either.
  template <bool kExact>
  __device__ void add_pairs(ColumnSums<C> const& sums, float (&of_pairs)[kOwn],
                            float (&crossing)[16]) const {
    float x[16];
#pragma unroll
    for (int t = 0; t < 16; ++t) {
      x[t] = static_cast<float>(keys.k[own.head][own.at(t)]);
      if constexpr (!kExact) {
        x[t] *= C::kReverse ? exp2_fast(sums.until[t] + kKeyShift)
                            : exp2_fast(-sums.until[t] - kKeyShift);
      }
    }
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      float const until = own.pick(sums.until, n);
      float const* const pairs = smem.pairs[own.head][own.strip][own.token(n)];
      auto const product = [&](int t) {
        float const span = C::kReverse ? sums.until[t] - until : until - sums.until[t];
        return pairs[t] * x[t] * (kExact ? exp2_fast(fminf(span, 0.f)) : 1.f);
      };
      float sum = 0.f;
      if constexpr (C::kReverse) {
#pragma unroll
        for (int t = 2 * n; t < 16; ++t) {
          sum += product(t);
        }
        of_pairs[n] = sum * (kExact ? 1.f : exp2_fast(-until - kKeyShift));
      } else {
        float const back = kExact ? 1.f : exp2_fast(until + kKeyShift);
        float const here = own_number(n) * back;
#pragma unroll
        for (int t = 0; t < 2 * n + 2; ++t) {
          // Pairs of a token before t and this one.
          bool const crosses = t < 2 * n + 1 || own.odd;
          crossing[t] += crosses ? here * sum : 0.f;
          sum += product(t);
        }
        of_pairs[n] = sum * back;
      }
      of_pairs[n] *= forward().scale;
    }
  }

  // What crosses each token: in dQ's order, queries from the token on that read the state before
  // the step, and pairs of it; in dK's, keys before the token that reach the state after the step,
  // and what the state before it leaves there.
  __device__ void add_to_gates(ColumnSums<C> const& sums, float const (&of_states)[kOwn],
                               float const (&crossing)[16], float const (&earlier)[kOwn]) const {
    float found[kOwn];
    float sum = 0.f;
    if constexpr (C::kReverse) {
#pragma unroll
      for (int part = 0; part < C::kWarpsV; ++part) {
        sum += smem.kept[own.head][part][own.strip][own.column];
      }
      sum *= p.walk.scale.unit * exp2_fast(sums.all());
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        float const product = own_number(n) * of_states[n], other = own.of_other(product);
        found[n] = earlier[n] + (own.odd ? sum + other : sum);
        sum += product + other;
      }
    } else {
#pragma unroll
      for (int n = kOwn - 1; n >= 0; --n) {
        float const product = own_number(n) * of_states[n], other = own.of_other(product);
        float const to_other = own.odd ? crossing[2 * n] : crossing[2 * n + 1];
        float const pairs = own.pick(crossing, n) + own.of_other(to_other);
        float const both = product + other;
        found[n] = sum + (own.odd ? product : both) + forward().scale * pairs;
        sum += both;
      }
    }
    float* const to = first_of(p.dg);
    for_tokens([&](int n) { to[n * step()] = found[n]; });
  }

  __device__ void store(float const (&of_states)[kOwn], float const (&of_pairs)[kOwn]) const {
    auto const store_as = [&]<class Number>(Number* const to) {
      for_tokens([&](int n) { to[n * step()] = Number(of_states[n] + of_pairs[n]); });
    };
    if (p.fp32) {
      store_as(first_of(static_cast<float*>(p.out.ptr)));
    } else {
      store_as(first_of(static_cast<Element*>(p.out.ptr)));
    }
  }

  // The thread's first token in a tensor that lies as `out` does, and how far the next one is: rows
  // lie one after the other, so that 32 bits have it.
  template <class T>
  __device__ T* first_of(T* tensor) const {
    return tensor + p.v_tile_stride * (walk.tile.v_begin / C::kV) +
           p.out.offset(tokens.batch, tokens.row + own.row(own.odd), walk.tile.head + own.head) +
           column();
  }
  __device__ int step() const { return 2 * static_cast<int>(p.out.row_stride); }
  __device__ int column() const { return walk.tile.k_begin + own.column; }

  // Calls use(n) for the thread's tokens that exist.
  template <class Use>
  __device__ void for_tokens(Use use) const {
    int const left = column() < forward().k_dim ? tokens.count - own.row(own.odd) : 0;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (2 * n < left) {
        use(n);
      }
    }
  }
};

}  // namespace flash::sm80::linear
