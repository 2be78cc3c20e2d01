#include "api/attributes.h"

#include <algorithm>

#include "core/dropout.h"
#include "core/mask.h"

namespace flash::api {
namespace {

// Windows as wide as every sequence are no windows; this also keeps row + window within an int.
int window(int64_t width, Seqlens const& s) {
  int64_t const widest = std::min<int64_t>(int64_t(s.seqlen_q) + s.seqlen_k, kUnbounded);
  return width < 0 || width >= widest ? -1 : static_cast<int>(width);
}

}  // namespace

int count(int64_t n, char const* name) {
  check(n >= 0 && n < kUnbounded, name, " is ", n, ", expected 0 to ", kUnbounded - 1);
  return static_cast<int>(n);
}

Mask mask(Attributes const& a, Seqlens const& seqlens) {
  return {window(a.window_left, seqlens), a.causal ? 0 : window(a.window_right, seqlens)};
}

Scores scores(Attributes const& a, FwdParams const& p, Tensor const& q,
              OptionalTensor const& rng_state) {
  check(a.dropout_p >= 0 && a.dropout_p < 1, "dropout_p is ", a.dropout_p,
        ", expected 0 <= dropout_p < 1");
  check(a.softcap >= 0, "softcap is ", a.softcap, ", expected 0 or more");
  Scores s{};
  s.softmax_scale = static_cast<float>(a.softmax_scale);
  s.softcap = static_cast<float>(a.softcap);
  if (a.alibi_slopes) {
    bool const per_batch = a.alibi_slopes->dim() == 2;
    int64_t const batch = per_batch ? p.seqlens.batch : 1;
    s.alibi_slopes = float_vector(*a.alibi_slopes, "alibi_slopes", batch * p.heads_q, q);
    s.alibi_batch_stride = per_batch ? p.heads_q : 0;
  }
  if (a.s_aux) {
    s.s_aux = float_vector(*a.s_aux, "s_aux", p.heads_q, q);
  }
  if (rng_state) {
    s.dropout_p = static_cast<float>(a.dropout_p);
    s.dropout_threshold = dropout_threshold(a.dropout_p);
    s.rng_state = static_cast<int64_t const*>(rng_state->data_ptr());
  }
  return s;
}

void set_pages(FwdParams& p, Tensor const& k, Tensor const& block_table, Tensor const& q) {
  check_on_device_of(block_table, "block_table", q);
  check(block_table.scalar_type() == ScalarType::Int && block_table.dim() == 2 &&
            block_table.size(0) == p.seqlens.batch &&
            (block_table.size(1) <= 1 || block_table.stride(1) == 1),
        "block_table must be int32 (", p.seqlens.batch, ", pages) with stride 1 in a row");
  check(k.size(1) > 0, "k has pages of ", k.size(1), " rows, expected 1 or more");
  p.pages.table = static_cast<int const*>(block_table.data_ptr());
  p.pages.table_stride = block_table.stride(0);
  p.pages.per_sequence = count(block_table.size(1), "block_table.size(1)");
  p.pages.page_size = FastDiv(count(k.size(1), "page size"));
  p.pages.count = count(k.size(0), "number of pages");
  p.seqlens.seqlen_k = count(block_table.size(1) * k.size(1), "block_table.size(1) * page size");
}

}  // namespace flash::api
