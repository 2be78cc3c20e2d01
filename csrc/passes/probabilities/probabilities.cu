// S_dmask: the softmax probabilities, negative where dropout drops them. For tests only, so one
// thread computes one entry, and the attention kernels know nothing of it.
#include "passes/probabilities/launch.h"

#include <cutlass/numeric_types.h>

#include <string_view>

#include "core/dropout.h"
#include "core/mask.h"
#include "core/score_mod.h"
#include "launch/launch_kernel.h"
#include "params/fwd_params.h"

namespace flash::probabilities {

constexpr int kThreads = 256;

struct Entry {
  int batch;
  int head;
  int row;
  int key;
};

// Numbers CTAs by their kThreads keys, then by rows, heads and sequences.
FLASH_HD int64_t num_blocks(FwdParams const& p) {
  int64_t const key_blocks = (int64_t(p.seqlens.seqlen_k) + kThreads - 1) / kThreads;
  return key_blocks * p.seqlens.seqlen_q * p.heads_q * p.seqlens.batch;
}

FLASH_HD Entry entry_of(FwdParams const& p, int64_t block, int thread) {
  int64_t const key_blocks = (int64_t(p.seqlens.seqlen_k) + kThreads - 1) / kThreads;
  int64_t const row_index = block / key_blocks;
  int64_t const head_index = row_index / p.seqlens.seqlen_q;
  return {int(head_index / p.heads_q), int(head_index % p.heads_q),
          int(row_index % p.seqlens.seqlen_q), int(block % key_blocks * kThreads + thread)};
}

// exp(score - LSE), what the forward kernel's online softmax comes to.
template <class Element>
FLASH_HD float probability(FwdParams const& p, BlockInfo const& info, Entry e) {
  auto const row_of = [&](TensorView<const void> const& x, int64_t row, int head) {
    return static_cast<Element const*>(x.ptr) + x.offset(e.batch, row, head);
  };
  Element const* const q = row_of(p.q, info.row_q + e.row, e.head);
  Element const* const k = row_of(p.k, info.row_k + e.key, e.head / (p.heads_q / p.heads_kv));
  float product = 0.f;
  for (int d = 0; d < p.head_dim; ++d) {
    product += float(q[d]) * float(k[d]);
  }
  Scores const& s = p.scores;
  ScoreMod const mod{s.softmax_scale, s.softcap, s.alibi_slope(e.batch, e.head),
                     info.seqlen_k - info.seqlen_q};
  float const score = mod.score(product, e.row, e.key);
  return exp2_fast((score - *p.lse.at(e.batch, info.row_q + e.row, e.head)) * kLog2e);
}

// s_dmask: [b, h, sq, sk], contiguous; sq and sk are the longest sequence's. Zero outside of one.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    probabilities_kernel(__grid_constant__ FwdParams const p, Element* const s_dmask) {
  Entry const e = entry_of(p, blockIdx.x, threadIdx.x);
  if (e.key >= p.seqlens.seqlen_k) {
    return;
  }
  BlockInfo const info(p.seqlens, e.batch);
  float value = 0.f;
  if (e.row < info.seqlen_q && e.key < info.seqlen_k) {
    KeyLimits const keys = SequenceMask(p.mask, info.seqlen_q, info.seqlen_k).limits(e.row);
    if (e.key >= keys.begin && e.key < keys.end) {
      value = probability<Element>(p, info, e);
    }
    // A masked entry is dropped or kept like any other: its zero has a sign.
    if (p.scores.dropout_p > 0.f &&
        !DropoutMask(p.scores, e.batch, p.heads_q, e.head).keep(e.row, e.key)) {
      value = -value;
    }
  }
  int64_t const row = (int64_t(e.batch) * p.heads_q + e.head) * p.seqlens.seqlen_q + e.row;
  s_dmask[row * p.seqlens.seqlen_k + e.key] = Element(value);
}

template <class Element>
void launch_for(FwdParams const& p, void* s_dmask, LaunchContext const& launch) {
  launch_kernel<probabilities_kernel<Element>>(launch, {num_blocks(p), kThreads, 0}, p,
                                               static_cast<Element*>(s_dmask));
}

}  // namespace flash::probabilities

void flash::launch_probabilities(FwdParams const& params, char const* dtype, void* s_dmask,
                                 LaunchContext const& launch) {
  using namespace probabilities;
  auto const launch_it = std::string_view(dtype) == "bf16" ? launch_for<cutlass::bfloat16_t>
                                                           : launch_for<cutlass::half_t>;
  launch_it(params, s_dmask, launch);
}
