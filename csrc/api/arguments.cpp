#include "api/arguments.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

#include "core/dropout.h"
#include "core/mask.h"
#include "core/score_mod.h"
#include "params/head_dims.h"

namespace flash::api {
namespace {

constexpr int64_t kGenerator = 2;  // seed, offset
constexpr int64_t kOrigin = sizeof(DropoutOrigin) / sizeof(int64_t);

// A window as wide as any sequence can be is no window; this also keeps row + window within an int.
// max_seqlen is not used as that width, because it may be wrong.
int window(int64_t width, Seqlens const& lengths) {
  int64_t const longest_q = lengths.cu_q ? lengths.total_q : lengths.seqlen_q;
  int64_t const longest_k = lengths.cu_k && !lengths.in_pages ? lengths.total_k : lengths.seqlen_k;
  int64_t const widest = std::min<int64_t>(longest_q + longest_k, kUnbounded);
  return width < 0 || width >= widest ? -1 : static_cast<int>(width);
}

// slopes: [h] or [b, h], of any strides.
void set_alibi(Scores& s, Tensor const& slopes, int batch, int heads, Tensor const& q) {
  int64_t const dims = slopes.dim();
  bool const per_batch = dims == 2;
  check_on_device_of(slopes, "alibi_slopes", q);
  require(slopes.scalar_type() == ScalarType::Float && (dims == 1 || dims == 2) &&
              slopes.size(dims - 1) == heads && (!per_batch || slopes.size(0) == batch),
          "alibi_slopes", "slopes", batch, heads);
  s.alibi_slopes = static_cast<float const*>(slopes.data_ptr());
  s.alibi_batch_stride = per_batch ? slopes.stride(0) : 0;
  s.alibi_head_stride = slopes.stride(dims - 1);
}

struct DescaleArgument {
  OptionalTensor const& numbers;
  double all;
  char const* name;
};

Descale descale_of(DescaleArgument const& descale, Tensor const& cache, FwdParams const& p,
                   Tensor const& q) {
  Descale made{};
  made.all = static_cast<float>(descale.all);
  if (!descale.numbers) {
    return made;
  }
  Tensor const& numbers = *descale.numbers;
  char const* const name = descale.name;
  check_on_device_of(numbers, name, q);
  made.of_rows = numbers.dim() == 3;
  bool const fits = made.of_rows
                        ? cache.dim() == 4 && numbers.size(0) == cache.size(0) &&
                              numbers.size(1) == cache.size(1) && numbers.size(2) == p.heads_kv
                        : numbers.dim() == 2 && numbers.size(0) == p.seqlens.batch &&
                              numbers.size(1) == p.heads_kv;
  require(numbers.scalar_type() == ScalarType::Float && fits, name, "descale", numbers,
          p.seqlens.batch, p.heads_kv);
  made.ptr = static_cast<float const*>(numbers.data_ptr());
  made.batch_stride = numbers.stride(0);
  made.row_stride = made.of_rows ? numbers.stride(1) : 0;
  made.head_stride = numbers.stride(numbers.dim() - 1);
  return made;
}

// Before new rows are written: no kernel would read them.
void refuse_wide_codes(FwdParams const& p) {
  if (p.codes.used && is_wide(p.head_dim, p.head_dim_v)) {
    throw std::runtime_error(
        concat(kNotImplemented, "codes (fp8) of head dims above ", kMostNarrowHeadDim));
  }
}

}  // namespace

int count(int64_t n, char const* name) {
  require(n >= 0 && n < kUnbounded, name, "range", n, 0, kUnbounded - 1);
  return static_cast<int>(n);
}

Seqlens dense_lengths(Tensor const& q, Tensor const& k, Tensor const& v) {
  require(q.dim() == 4, "q", "dims", q.dim(), 4);
  int64_t const batch = q.size(0);
  require(
      k.dim() == 4 && k.size(0) == batch && divides(k.size(2), q.size(2)) && k.size(3) == q.size(3),
      "k", "shape", k, "q", q);
  require(v.dim() == 4 && v.size(0) == batch && v.size(1) == k.size(1) && v.size(2) == k.size(2),
          "v", "shape", v, "k", k);
  Seqlens lengths{};
  lengths.batch = count(batch, "batch");
  lengths.seqlen_q = count(q.size(1), "seqlen_q");
  lengths.seqlen_k = count(k.size(1), "seqlen_k");
  return lengths;
}

Seqlens varlen_lengths(Tensor const& q, Tensor const& k, Tensor const& v,
                       Tensor const& cu_seqlens_q, Tensor const& cu_seqlens_k, int64_t max_seqlen_q,
                       int64_t max_seqlen_k, OptionalTensor const& seqused_k, bool in_pages) {
  require(q.dim() == 3, "q", "dims", q.dim(), 3);
  require(cu_seqlens_q.dim() == 1, "cu_seqlens_q", "dims", cu_seqlens_q.dim(), 1);
  int64_t const dims = in_pages ? 4 : 3;
  int64_t const columns = in_pages ? in_chunks(k.size(-1)) : k.size(-1);
  require(k.dim() == dims && divides(k.size(-2), q.size(1)) && columns == q.size(2), "k", "shape",
          k, "q", q);
  require(v.dim() == dims && v.size(0) == k.size(0) && v.size(1) == k.size(1) &&
              v.size(-2) == k.size(-2),
          "v", "shape", v, "k", k);
  int64_t const batch = cu_seqlens_q.size(0) - 1;
  Seqlens lengths{};
  lengths.batch = count(batch, "len(cu_seqlens_q) - 1");
  lengths.seqlen_q = count(max_seqlen_q, "max_seqlen_q");
  lengths.seqlen_k = count(max_seqlen_k, "max_seqlen_k");
  lengths.total_q = count(q.size(0), "total_q");
  lengths.total_k = count(k.size(0), "total_k");
  lengths.cu_q = int32_vector(cu_seqlens_q, "cu_seqlens_q", batch + 1, q);
  lengths.cu_k = int32_vector(cu_seqlens_k, "cu_seqlens_k", batch + 1, q);
  lengths.used_k = int32_vector(seqused_k, "seqused_k", batch, q);
  return lengths;
}

void set_pages(FwdParams& p, Tensor const& k, Tensor const& block_table, Tensor const& q) {
  check_on_device_of(block_table, "block_table", q);
  require(block_table.scalar_type() == ScalarType::Int && block_table.dim() == 2 &&
              block_table.size(0) == p.seqlens.batch &&
              (block_table.size(1) <= 1 || block_table.stride(1) == 1),
          "block_table", "pages", p.seqlens.batch);
  require(k.size(1) > 0, "page_size", "least", k.size(1), 1);
  p.pages.table = static_cast<int const*>(block_table.data_ptr());
  p.pages.table_stride = block_table.stride(0);
  p.pages.per_sequence = count(block_table.size(1), "block_table.size(1)");
  p.pages.page_size = FastDiv(count(k.size(1), "page size"));
  p.pages.count = count(k.size(0), "number of pages");
  p.seqlens.in_pages = true;
  p.seqlens.seqlen_k = count(block_table.size(1) * k.size(1), "block_table.size(1) * page size");
}

void set_keys(FwdParams& p, KeyTensors const& keys, Tensor const& q) {
  auto const& [k, v, of_cache, k_name, v_name] = keys;
  int64_t const columns_k = k.size(-1), columns_v = v.size(-1);
  p.head_dim = static_cast<int>(q.size(-1));
  p.head_dim_v = static_cast<int>(in_chunks(columns_v));
  p.odd = {};
  p.codes.used = of_cache && has_codes(k);
  if (p.codes.used) {
    check_codes(k, k_name, q);
    check_codes(v, v_name, q);
    p.k = view<const void>(k, k.data_ptr());
    p.v = view<const void>(v, v.data_ptr());
    if (!(has_whole_chunks(k) && has_whole_chunks(v))) {
      p.odd = {static_cast<int>(columns_k), static_cast<int>(columns_v)};
    }
  } else if (of_cache && (columns_k != p.head_dim || columns_v != p.head_dim_v)) {
    check_rows(k, k_name, q);
    check_rows(v, v_name, q);
    p.k = view<const void>(k, k.data_ptr());
    p.v = view<const void>(v, v.data_ptr());
    p.odd = {static_cast<int>(columns_k), static_cast<int>(columns_v)};
  } else {
    p.k = operand(k, k_name, q);
    p.v = operand(v, v_name, q);
  }
}

void set_latent_queries(FwdParams& p, OptionalTensor const& qv, Tensor const& q) {
  if (!qv) {
    return;
  }
  int64_t const dims = q.dim();
  bool fits = qv->dim() == dims && qv->size(-1) == p.head_dim_v;
  for (int64_t i = 0; fits && i + 1 < dims; ++i) {
    fits = qv->size(i) == q.size(i);
  }
  require(fits, "qv", "shape", *qv, "q", q);
  if (p.codes.used || p.odd.any()) {
    throw std::runtime_error(
        concat(kNotImplemented,
               "a latent cache (qv) of codes (fp8), or of head dims that 8 does not divide"));
  }
  p.q_latent = operand(*qv, "qv", q);
}

void set_descales(FwdParams& p, CodeArguments const& codes, KeyTensors const& keys,
                  Tensor const& q) {
  auto const& [k_descale, v_descale, k_all, v_all] = codes;
  bool const any = k_descale || v_descale || k_all != 1 || v_all != 1;
  require(p.codes.used || !any, "k_descale", "needs", "k_cache and v_cache of Float8_e4m3fn");
  refuse_wide_codes(p);
  p.codes.k = descale_of({k_descale, k_all, "k_descale"}, keys.k, p, q);
  p.codes.v = descale_of({v_descale, v_all, "v_descale"}, keys.v, p, q);
}

void set_query_descale(FwdParams& p, OptionalTensor const& q_descale, double q_descale_all,
                       Tensor const& q) {
  require(!q_descale || q_descale->dim() == 2, "q_descale", "dims",
          q_descale ? q_descale->dim() : 0, 2);
  p.codes.q = descale_of({q_descale, q_descale_all, "q_descale"}, q, p, q);
}

Mask mask(ScoreArguments const& a, Seqlens const& lengths) {
  return {window(a.window_left, lengths), a.causal ? 0 : window(a.window_right, lengths)};
}

void check_numbers(ScoreArguments const& a) {
  require(a.dropout_p >= 0 && a.dropout_p <= dropout_rate(kMaxDropoutThreshold), "dropout_p",
          "range", a.dropout_p, 0, "1 - 2**-16");
  require(a.softcap >= 0, "softcap", "least", a.softcap, 0);
}

Scores scores(ScoreArguments const& a, Seqlens const& lengths, int heads_q, Tensor const& q,
              OptionalTensor const& rng_state) {
  Scores s{};
  s.softmax_scale = static_cast<float>(a.softmax_scale);
  s.softcap = softcap_in_range(a.softcap);
  if (a.alibi_slopes) {
    set_alibi(s, *a.alibi_slopes, lengths.batch, heads_q, q);
  }
  if (a.s_aux) {
    s.s_aux = float_vector(*a.s_aux, "s_aux", heads_q, q);
  }
  if (rng_state) {
    s.dropout_threshold = dropout_threshold(a.dropout_p);
    s.dropout_p = dropout_rate(s.dropout_threshold);
    s.rng_state = static_cast<int64_t const*>(rng_state->data_ptr());
    s.dropout_origins = dropout_origins(*rng_state);
  }
  return s;
}

Tensor draw_rng_state(Tensor const& q) {
  // random_(Tensor(a!) self, *, Generator? generator=None) -> Tensor(a!)
  std::array<StableIValue, 2> stack{torch::stable::detail::from(empty(q, {2}, ScalarType::Long)),
                                    torch::stable::detail::from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::random_", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor checked_rng_state(Tensor const& rng_state, int batch, Tensor const& q) {
  check_on_device_of(rng_state, "rng_state", q);
  int64_t const size = rng_state.numel();
  require(rng_state.scalar_type() == ScalarType::Long && rng_state.dim() == 1 &&
              (size == kGenerator || size == kGenerator + kOrigin * batch),
          "rng_state", "vector", "int64", "2, or 2 + 3 * batch,");
  return rng_state.is_contiguous() ? rng_state : torch::stable::clone(rng_state);
}

DropoutOrigin const* dropout_origins(Tensor const& rng_state) {
  auto const* numbers = static_cast<int64_t const*>(rng_state.data_ptr());
  return rng_state.numel() == kGenerator
             ? nullptr
             : reinterpret_cast<DropoutOrigin const*>(numbers + kGenerator);
}

}  // namespace flash::api
