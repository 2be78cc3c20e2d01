// dQ, dK, dV and dg of each chunk and head, from the state before the chunk and the gradient of the
// one after it. A warp has a strip of 16 rows of each. A and the gradient of Q Kᵀ are computed
// once, over all columns, and kept in squares; then come the gradients, tile by tile.
#pragma once

#include "sm80/linear/accumulator_rows.h"
#include "sm80/linear/gate_gradient.h"

namespace flash::sm80::linear {

// Which tiles shared memory has, by the first column or row and column.
struct Staged {
  int qk = -1;
  int vdo = -1;
  int state_k = -1;
  int state_v = -1;
};

template <class C>
struct Gradients {
  using Element = typename C::Element;
  using Sums = float (&)[2 * C::kStrips][4];

  BackwardParams const& p;
  GradientsStorage<C>& smem;
  flash::linear::Tokens tokens;
  int slot;
  int head;
  int strip = threadIdx.x / 32;
  Staged staged{};

  __device__ ForwardParams const& forward() const { return p.forward; }
  // The first column of the last tile of Q and K.
  __device__ int last_k() const { return C::kTiled ? (forward().k_dim - 1) / C::kK * C::kK : 0; }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int strips() const { return (tokens.count + 15) / 16; }
  __device__ bool exists() const { return strip < strips(); }
  __device__ int row(int half) const { return strip * 16 + half * 8 + lane() / 4; }
  __device__ Element* square(Element* squares, int of, int other) const {
    return squares + square_number(of, other) * kSquare;
  }
  __device__ Element* square(Element* squares, int back) const {  // of this strip's rows
    return square(squares, strip, strip - back);
  }

  // ---- tiles ------------------------------------------------------------------------------------

  template <int kColumns, class T>
  __device__ void load_rows(TensorView<T> const& x, int of, int column, int columns, bool aligned,
                            Element* tile) const {
    load_tile<C::kChunk, kColumns, C::kThreads>(rows_of<Element>(x, tokens, of, column),
                                                x.row_stride, tile, tokens.count, columns - column,
                                                aligned);
  }

  __device__ void load_state(void const* states, int k, int v, StateElement* tile) const {
    ForwardParams const& f = forward();
    int const columns = f.v_columns();
    auto const* state = static_cast<StateElement const*>(states) +
                        (int64_t(slot) * f.heads + head) * f.state_size();
    load_tile<C::kK, C::kV, C::kThreads>(state + int64_t(k) * columns + v, columns, tile,
                                         f.k_dim - k, columns - v, /*aligned=*/true);
  }

  // Starts to bring the tiles of Q and K from this column on, if they are not there.
  __device__ void want_qk(int column) {
    if (staged.qk != column) {
      ForwardParams const& f = forward();
      staged.qk = column;
      load_rows<C::kK>(f.q, head / f.group, column, f.k_dim, f.aligned_k, smem.q);
      load_rows<C::kK>(f.k, head / f.group, column, f.k_dim, f.aligned_k, smem.k);
    }
  }
  __device__ void want_vdo(int column) {
    if (staged.vdo != column) {
      ForwardParams const& f = forward();
      staged.vdo = column;
      load_rows<C::kV>(f.v, head, column, f.v_dim, f.aligned_v, smem.v);
      load_rows<C::kV>(p.dout, head, column, f.v_dim, f.aligned_v, smem.dout);
    }
  }
  __device__ void want_states(int k, int v) {
    if (staged.state_k != k || staged.state_v != v) {
      staged.state_k = k;
      staged.state_v = v;
      load_state(forward().workspace.states, k, v, smem.state);
      load_state(p.dstates, k, v, smem.dstate);
    }
  }

  __device__ void release() const { __syncthreads(); }  // no thread reads tiles any more
  __device__ void arrive() const {
    cp_async_fence();
    cp_async_wait<0>();
    __syncthreads();
  }

  // ---- A, and the gradient of Q Kᵀ --------------------------------------------------------------

  // sums (16, columns' tokens) += rows * columnsᵀ of two tiles, up to the strip's own tokens.
  // Squares count from the strip's own one back, so that the diagonal is the first in every warp.
  template <int kColumns>
  __device__ void add_scores(Element const* rows, Element const* columns, Sums sums) const {
#pragma unroll 1
    for (int d = 0; d < kColumns; d += 16) {
      uint32_t a[4], b[4];
      read_a<kColumns>(rows, strip * 16, d, a);
#pragma unroll
      for (int back = 0; back < C::kStrips; ++back) {
        if (back <= strip) {
          read_b<kColumns>(columns, (strip - back) * 16, d, b);
          multiply<Element>(a, b, sums[2 * back], sums[2 * back + 1]);
        }
      }
    }
  }

  // Multiplies a square by scale e^{G_i − G_j}; 0 above the diagonal.
  __device__ void weigh(int back, float (&left)[4], float (&right)[4]) const {
    float const scale = forward().scale;
    int const other = strip - back;
    if (back == 0) {
      scale_diagonal(left, right, scale, smem.cumulated + strip * 16, lane());
      return;
    }
    StripDecays const decay{smem.cumulated};
    scale_square(left, right, scale * decay.between(other, strip), smem.to_end + other * 16,
                 lane());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float const factor = decay.from_begin(row(half));
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        left[i] *= factor;
        right[i] *= factor;
      }
    }
  }

  __device__ void store_weights(Sums sums) const {
#pragma unroll
    for (int back = 0; back < C::kStrips; ++back) {
      if (back <= strip) {
        weigh(back, sums[2 * back], sums[2 * back + 1]);
        store_square(square(smem.weights, back), sums[2 * back], sums[2 * back + 1]);
        if (p.dg) {
          store_rest<Element>(rest(back), sums[2 * back], sums[2 * back + 1]);
        }
      }
    }
  }

  // What rounding left of A, until the gradient of Q Kᵀ takes its place. In fp16 that is all of A's
  // smallest numbers, and some gates' gradients are made of nothing else.
  __device__ StateElement* rest(int back) const {
    return reinterpret_cast<StateElement*>(square(smem.dscores, back));
  }

  // From dP = dO Vᵀ.
  __device__ void store_dscores(Sums sums) const {
    float of_rows[2] = {};
#pragma unroll
    for (int back = 0; back < C::kStrips; ++back) {
      if (back <= strip) {
        if (p.dg) {
          add_pairs(back, sums[2 * back], sums[2 * back + 1], of_rows);
        }
        weigh(back, sums[2 * back], sums[2 * back + 1]);
        store_square(square(smem.dscores, back), sums[2 * back], sums[2 * back + 1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float const sum = sum_of_row(of_rows[half]);
      if (lane() % 4 == 0) {
        smem.gate.rows[row(half)] = sum;
      }
    }
  }

  // A square of W = A ∘ dP in the sums of the gates' gradient.
  __device__ void add_pairs(int back, float const (&left)[4], float const (&right)[4],
                            float (&of_rows)[2]) const {
    float near[4], far[4], rest_near[4], rest_far[4];
    load_square(square(smem.weights, back), near, far);
    load_square(rest(back), rest_near, rest_far);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      near[i] = (near[i] + rest_near[i]) * left[i];
      far[i] = (far[i] + rest_far[i]) * right[i];
    }
    if (back == 0) {
      store_own(near, far, smem.gate.own + strip * 16);
      return;
    }
    store_columns(near, far, smem.gate.columns[pair_number(strip, strip - back)]);
    of_rows[0] += near[0] + near[1] + far[0] + far[1];
    of_rows[1] += near[2] + near[3] + far[2] + far[3];
  }

  // Leaves the last tiles of Q and K, and of V and dO.
  __device__ void compute_scores() {
    {
      float sums[2 * C::kStrips][4] = {};
#pragma unroll 1
      for (int k = 0; k <= last_k(); k += C::kK) {
        if (k > 0) {
          release();
        }
        want_qk(k);
        arrive();
        if (exists()) {
          add_scores<C::kK>(smem.q, smem.k, sums);
        }
      }
      if (exists()) {
        store_weights(sums);
      }
    }
    float sums[2 * C::kStrips][4] = {};
#pragma unroll 1
    for (int v = 0; v < forward().v_dim; v += C::kV) {
      if (v > 0) {
        release();
      }
      want_vdo(v);
      arrive();
      if (exists()) {
        add_scores<C::kV>(smem.dout, smem.v, sums);
      }
    }
    if (exists()) {
      store_dscores(sums);
    }
  }

  // ---- gradients --------------------------------------------------------------------------------

  // dq (16, kK) += dO S0ᵀ, dk += V dS'ᵀ, over the columns of a tile of V.
  __device__ void add_states(Rows<C::kK>& dq, Rows<C::kK>& dk) const {
#pragma unroll
    for (int d = 0; d < C::kV; d += 16) {
      add_state<false>(smem.dout, smem.state, d, dq);
      add_state<false>(smem.v, smem.dstate, d, dk);
    }
  }

  // sums (16, columns) += the rows' columns d to d + 15 * a state's. `deep`: the state's rows are
  // what is summed over, else its columns.
  template <bool kDeep, int kColumns>
  __device__ void add_state(Element const* rows, StateElement const* state, int d,
                            float (&sums)[kColumns][4]) const {
    uint32_t a[4], b[4];
    read_a<kDeep ? C::kK : C::kV>(rows, strip * 16, d, a);
    AgainstState<Element> const against(a);
#pragma unroll
    for (int n = 0; n < 8 * kColumns; n += 16) {
      if constexpr (kDeep) {
        read_b_deep<C::kV>(state, d, n, b);
      } else {
        read_b<C::kV>(state, n, d, b);
      }
      against.multiply_by(b, sums[n / 8], sums[n / 8 + 1]);
    }
  }

  // rows (16, kK) *= factors; out[row] += the product with the tile's row.
  __device__ void scale_and_dot(Rows<C::kK>& rows, float const (&factor)[2], Element const* tile,
                                bool first, float* out) const {
    float dot[2] = {};
#pragma unroll
    for (int n = 0; n < C::kK / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Element const* const run = tile + offset_in_tile<C::kK>(row(half), n) + lane() % 4 * 2;
        float2 const x = unpack<Element>(*reinterpret_cast<uint32_t const*>(run));
        float (&y)[4] = rows[n];
        y[2 * half] *= factor[half];
        y[2 * half + 1] *= factor[half];
        dot[half] += x.x * y[2 * half] + x.y * y[2 * half + 1];
      }
    }
    if (p.dg) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const sum = sum_of_row(dot[half]);
        if (lane() % 4 == 0) {
          out[row(half)] = sum + (first ? 0.f : out[row(half)]);
        }
      }
    }
  }

  // sums (16, kColumns) += a strip's square * a tile's rows of its columns' tokens.
  template <int kColumns>
  __device__ void add_earlier(Element* squares, Element const* tile, Rows<kColumns>& sums) const {
#pragma unroll 1
    for (int other = 0; other <= strip; ++other) {
      uint32_t a[4];
      read_a<16>(square(squares, strip, other), 0, 0, a);
      add_square<kColumns>(a, tile, other, sums);
    }
  }
  // The same with the squares whose columns are this strip's tokens, transposed.
  template <int kColumns>
  __device__ void add_later(Element* squares, Element const* tile, Rows<kColumns>& sums) const {
#pragma unroll 1
    for (int later = strip; later < strips(); ++later) {
      uint32_t a[4];
      read_a_deep<16>(square(squares, later, strip), 0, 0, a);
      add_square<kColumns>(a, tile, later, sums);
    }
  }

  // What is left at the chunk's end, or S', of this lane's two tokens.
  __device__ void decays_to_end(float (&out)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      out[half] = decay_between(smem.cumulated[row(half)], smem.cumulated[C::kChunk - 1]);
    }
  }

  // dQ and dK of a tile, from what the states add to them.
  __device__ void finish_dqk(Rows<C::kK>& dq, Rows<C::kK>& dk, int k, bool first) const {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = forward().scale * decay_between({0.f, 0}, smem.cumulated[row(half)]);
    }
    scale_and_dot(dq, factor, smem.q, first, smem.gate.read);
    decays_to_end(factor);
    scale_and_dot(dk, factor, smem.k, first, smem.gate.reached);
    add_earlier<C::kK>(smem.dscores, smem.k, dq);
    add_later<C::kK>(smem.dscores, smem.q, dk);
    store_dqk(p.dq, dq, k);
    store_dqk(p.dk, dk, k);
  }

  // dV of a tile, from K dS'.
  __device__ void finish_dv(Rows<C::kV>& dv, int v) const {
    float factor[2];
    decays_to_end(factor);
#pragma unroll
    for (int n = 0; n < C::kV / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dv[n][i] *= factor[i / 2];
      }
    }
    add_later<C::kV>(smem.weights, smem.dout, dv);
    store<Element, C::kV>(p.dv, dv, v, forward().v_dim);
  }

  // The thread's part of Σ S0 ∘ dS' of a tile.
  __device__ float kept() const {
    float sum = 0.f;
    for (int i = threadIdx.x; i < C::kK * C::kV / 2; i += C::kThreads) {
      float2 const x = unpack<StateElement>(reinterpret_cast<uint32_t const*>(smem.state)[i]);
      float2 const y = unpack<StateElement>(reinterpret_cast<uint32_t const*>(smem.dstate)[i]);
      sum += x.x * y.x + x.y * y.y;
    }
    return sum;
  }

  __device__ void store_dqk(TensorView<void> const& out, Rows<C::kK> const& rows, int k) const {
    if (p.fp32) {
      store<float, C::kK>(out, rows, k, forward().k_dim);
    } else {
      store<Element, C::kK>(out, rows, k, forward().k_dim);
    }
  }

  // Rows of results are without gaps: where their columns are even, pairs are whole words.
  template <class Out, int kColumns>
  __device__ void store(TensorView<void> const& out, Rows<kColumns> const& rows, int column,
                        int columns) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= tokens.count) {
        continue;
      }
      Out* const target = rows_of<Out>(out, tokens, head, 0) + row(half) * out.row_stride;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        int const at = column + n * 8 + lane() % 4 * 2;
        store_pair(target + at, columns - at, columns % 2 == 0, rows[n][2 * half],
                   rows[n][2 * half + 1]);
      }
    }
  }

  // Tiles of V in the reverse order of compute_scores, whose last tile is the first one here.
  __device__ void compute_gradients() {
    int const last_v = (forward().v_dim - 1) / C::kV * C::kV;
    float of_states = 0.f;
#pragma unroll 1
    for (int k = last_k(); k >= 0; k -= C::kK) {
      float dq[C::kK / 8][4] = {}, dk[C::kK / 8][4] = {};
#pragma unroll 1
      for (int v = last_v; v >= 0; v -= C::kV) {
        release();
        want_qk(k);
        want_vdo(v);
        want_states(k, v);
        arrive();
        if (p.dg) {
          of_states += kept();
        }
        if (exists()) {
          add_states(dq, dk);
          if constexpr (!C::kTiled) {
            float dv[C::kV / 8][4] = {};
            add_keys(dv);
            finish_dv(dv, v);
          }
        }
      }
      if (exists()) {
        finish_dqk(dq, dk, k, k == last_k());
      }
    }
    if (p.dg) {
      float const sum = sum_of_row(sum_of_column(of_states));
      if (lane() == 0) {
        smem.gate.kept[strip] = sum;
      }
    }
  }

  // dv (16, kV) += K dS' of a tile of K.
  __device__ void add_keys(Rows<C::kV>& dv) const {
#pragma unroll
    for (int d = 0; d < C::kK; d += 16) {
      add_state<true>(smem.k, smem.dstate, d, dv);
    }
  }

  __device__ void compute_dv() {
    for (int v = 0; v < forward().v_dim; v += C::kV) {
      float dv[C::kV / 8][4] = {};
      for (int k = 0; k < forward().k_dim; k += C::kK) {
        release();
        want_qk(k);
        want_vdo(v);
        want_states(k, v);
        arrive();
        if (exists()) {
          add_keys(dv);
        }
      }
      if (exists()) {
        finish_dv(dv, v);
      }
    }
  }

  __device__ void compute_dg() const {
    __syncthreads();
    sum_strips(smem.gate, strips());
    __syncthreads();
    float const total = decay_between({0.f, 0}, smem.cumulated[C::kChunk - 1]);
    for (int t = threadIdx.x; t < tokens.count; t += C::kThreads) {
      int64_t const token = int64_t(tokens.batch) * forward().sequences.seqlen + tokens.row + t;
      p.dg[token * forward().heads + head] = crossing(smem.gate, t, strips(), total);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    gradients_kernel(__grid_constant__ BackwardParams const p) {
  using Element = typename C::Element;
  auto& smem = *reinterpret_cast<GradientsStorage<C>*>(dynamic_smem());
  ForwardParams const& f = p.forward;
  int const head = blockIdx.x % f.heads, slot = blockIdx.x / f.heads;
  auto const chunk = flash::linear::chunk_of(f.sequences, slot);
  if (!chunk.exists()) {
    return;
  }
  Gradients<C> gradients{p, smem, chunk.tokens, slot, head};
  gradients.want_qk(0);
  gradients.want_vdo(0);
  if (threadIdx.x < 32) {
    flash::linear::cumulate<C::kChunk, Element>(f.gate, chunk.tokens, head, smem.cumulated);
  }
  __syncthreads();
  if (threadIdx.x < C::kChunk) {
    smem.to_end[threadIdx.x] = StripDecays{smem.cumulated}.to_end(threadIdx.x);
  }
  gradients.compute_scores();
  gradients.compute_gradients();
  if constexpr (C::kTiled) {
    gradients.compute_dv();
  }
  if (p.dg) {
    gradients.compute_dg();
  }
}

}  // namespace flash::sm80::linear
