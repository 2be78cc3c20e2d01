// Launches one instantiation; included by the generated files only.
#pragma once

#include "core/split_schedule.h"
#include "host/launch_kernel.h"
#include "sm80/decode/combine.h"
#include "sm80/decode/kernel.h"

namespace flash::sm80 {

template <class Config>
void launch_decode(DecodeParams const& params, LaunchContext const& launch) {
  FwdParams const& p = params.fwd;
  launch_kernel<decode_kernel<Config>>(
      launch, {num_pieces(params.split), Config::kThreads, kSmemBytes<Config>}, params);
  if (params.split.max_splits > 1) {
    int64_t const rows = int64_t(p.seqlens.batch) * p.seqlens.seqlen_q * p.heads_q;
    launch_kernel<combine_kernel<Config>>(
        launch, {rows, kCombineThreads, sizeof(CombineStorage<Config>)}, params);
  }
}

}  // namespace flash::sm80
