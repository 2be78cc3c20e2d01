// Converts the arguments that operations of linear attention over whole sequences share.
#pragma once

#include "api/arguments.h"
#include "linear/params.h"
#include "linear/tilings.h"

namespace flash::api {

using linear::ForwardParams;

inline bool has_unit_columns(Tensor const& t) {
  int64_t const last = t.dim() - 1;
  return t.stride(last) == 1 || t.size(last) <= 1 || t.numel() == 0;
}

// x [b, t, heads, columns], of like's dtype
inline void check_tensor(Tensor const& x, char const* name, Tensor const& like, int64_t heads,
                         int64_t columns) {
  check_on_device_of(x, name, like);
  check(x.dim() == 4 && x.size(0) == like.size(0) && x.size(1) == like.size(1) &&
            x.size(2) == heads && x.size(3) == columns,
        name, " must be (", like.size(0), ", ", like.size(1), ", ", heads, ", ", columns, ")");
  check(x.scalar_type() == like.scalar_type(), name, " has another dtype than q");
  check(has_unit_columns(x), name, " needs rows without gaps");
}

// Whether rows begin at multiples of 16 bytes and are whole runs of 16 bytes.
template <class T>
bool is_aligned(TensorView<T> const& x, int columns, int bytes = 2) {
  int const run = 16 / bytes;
  return columns % run == 0 && reinterpret_cast<uintptr_t>(x.ptr) % 16 == 0 &&
         x.batch_stride % run == 0 && x.row_stride % run == 0 && x.head_stride % run == 0;
}

inline bool is_vector(OptionalTensor const& g) { return g && g->dim() == 4; }

// [heads], [b, t, heads] or [b, t, heads, k], whose rows have no gaps
inline linear::GateView gate_view(OptionalTensor const& g, Tensor const& q, int64_t heads) {
  if (!g) {
    return {};
  }
  check_on_device_of(*g, "g", q);
  bool const fp32 = g->scalar_type() == ScalarType::Float;
  check(fp32 || g->scalar_type() == q.scalar_type(), "g must be fp32 or of q's dtype");
  auto const stride = [&](int dim) { return g->size(dim) == 1 ? 0 : g->stride(dim); };
  if (g->dim() == 1) {
    check(g->size(0) == heads, "g has ", g->size(0), " heads, expected ", heads);
    return {g->data_ptr(), 0, 0, stride(0), fp32};
  }
  check((g->dim() == 3 || is_vector(g)) && g->size(0) == q.size(0) && g->size(1) == q.size(1) &&
            g->size(2) == heads,
        "g must be (", heads, ") or (", q.size(0), ", ", q.size(1), ", ", heads, ", …)");
  check(!is_vector(g) || (g->size(3) == q.size(3) && has_unit_columns(*g)),
        "g must have a number for each of q's columns, without gaps");
  return {g->data_ptr(), stride(0), stride(1), stride(2), fp32};
}

template <class T>
linear::StateView<T> state_view(OptionalTensor const& state, char const* name,
                                ForwardParams const& p, Tensor const& q) {
  if (!state) {
    return {};
  }
  check_on_device_of(*state, name, q);
  check(state->scalar_type() == ScalarType::Float, name, " must be fp32");
  check(state->dim() == 4 && state->size(0) == p.sequences.count && state->size(1) == p.heads &&
            state->size(2) == p.k_dim && state->size(3) == p.v_dim,
        name, " must be (", p.sequences.count, ", ", p.heads, ", ", p.k_dim, ", ", p.v_dim, ")");
  return {static_cast<T*>(state->data_ptr()), state->stride(0), state->stride(1), state->stride(2),
          state->stride(3)};
}

inline void set_sequences(ForwardParams& p, Tensor const& q, OptionalTensor const& cu_seqlens,
                          int chunk) {
  linear::Sequences& s = p.sequences;
  check(!cu_seqlens || q.size(0) == 1, "with cu_seqlens the batch must be 1, not ", q.size(0));
  s.count = count(cu_seqlens ? cu_seqlens->numel() - 1 : q.size(0), "sequences");
  s.cu = int32_vector(cu_seqlens, "cu_seqlens", s.count + 1, q);
  s.seqlen = count(q.size(1), "tokens");
  s.chunk = chunk;
  s.slots = linear::most_slots(s.cu, s.count, s.seqlen, s.chunk);
}

// The inputs of either operation; o is not among them.
inline ForwardParams inputs(Tensor const& q, Tensor const& k, Tensor const& v,
                            OptionalTensor const& g, OptionalTensor const& cu_seqlens, double scale,
                            int chunk) {
  ForwardParams p{};
  p.heads = count(v.size(2), "heads");
  p.k_dim = count(q.size(3), "columns of q");
  p.v_dim = count(v.size(3), "columns of v");
  check(divides(q.size(2), p.heads), "v's heads must be a multiple of q's");
  p.group = static_cast<int>(p.heads / q.size(2));
  check_tensor(q, "q", q, q.size(2), p.k_dim);
  check_tensor(k, "k", q, q.size(2), p.k_dim);
  check_tensor(v, "v", q, p.heads, p.v_dim);
  set_sequences(p, q, cu_seqlens, chunk);
  p.q = view<void const>(q, q.data_ptr());
  p.k = view<void const>(k, k.data_ptr());
  p.v = view<void const>(v, v.data_ptr());
  p.aligned_k = is_aligned(p.q, p.k_dim) && is_aligned(p.k, p.k_dim);
  p.aligned_v = is_aligned(p.v, p.v_dim);
  p.gate = gate_view(g, q, p.heads);
  p.scale = static_cast<float>(scale);
  return p;
}

inline int columns_of_q(Tensor const& q, Tensor const& v) {
  check(q.dim() == 4 && v.dim() == 4, "q and v must be (b, t, heads, columns)");
  return count(q.size(3), "columns of q");
}

inline void set_results(ForwardParams& p, Tensor const& q, OptionalTensor const& initial_state,
                        Tensor const& o, OptionalTensor const& final_state) {
  check_tensor(o, "o", q, p.heads, p.v_dim);
  p.o = view<void>(o, o.data_ptr());
  p.aligned_v = p.aligned_v && is_aligned(p.o, p.v_dim);
  p.initial = state_view<float const>(initial_state, "initial_state", p, q);
  p.final = state_view<float>(final_state, "final_state", p, q);
}

}  // namespace flash::api
