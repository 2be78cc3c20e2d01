#pragma once

#include "core/score_fragments.h"
#include "params/fwd_params.h"
#include "sm90/forward/config.h"

namespace flash::sm90::forward {

// O = P·V accumulators of one warpgroup and what is needed to finish them.
template <class Config>
struct Accumulators {
  static constexpr int kRows = 2;  // of a thread
  decltype(partition_fragment_C(typename Config::MmaOut{},
                                Shape<Int<kWarpgroupRows>, Int<Config::kHeadDimV>>{})) out;
  OnlineSoftmax<kRows> softmax;
  using Tops =
      std::conditional_t<Config::kMaxLogits == MaxLogitsIn::Registers, KeptTops<kRows>, NoTops>;
  [[no_unique_address]] Tops tops;
  float slack;         // softmax.slack()
  float scale[kRows];  // what finished rows of `out` are multiplied by

  __device__ explicit Accumulators(float softmax_scale)
      : softmax(softmax_scale * kLog2e), slack(softmax.slack()) {
    clear(out);
  }

  __device__ auto rows() { return make_tensor(out.data(), rows_and_columns(out.layout())); }

  __device__ void rescale(float const (&factor)[kRows]) { scale_rows(rows(), factor); }
};

// O in 16 bits, two columns a word: of Q's dtype, or as the call asks beside queries of codes.
template <class Config, class Accumulator, class Words>
__device__ __forceinline__ void pack_out(FwdParams const& params, Accumulator const& from,
                                         Words& to) {
  if (Config::kFp8 && params.codes.bf16_out) {
    pack<bfloat16_t>(from, to);
  } else {
    pack<typename Config::Element>(from, to);
  }
}

// O of a finished row block, in 16 bits: (row of a thread, eight columns)
template <class Config>
using FinishedRows =
    decltype(make_tensor<uint32_t>(Layout<Shape<_2, Int<Config::kHeadDimV / 8>>>{}));

}  // namespace flash::sm90::forward
