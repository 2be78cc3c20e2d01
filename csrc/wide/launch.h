// Launches one instantiation; included by the generated files only.
#pragma once

#include "decode/piece_counters.h"
#include "wide/kernel.h"

namespace flash::wide {

template <class Config>
void launch_decode(DecodeParams const& params, LaunchContext const& launch) {
  launch_kernel<wide_kernel<Config>>(
      launch, {num_thread_blocks(params.schedule), Config::kThreads, kSmemBytes<Config>},
      with_counters(params, launch));
}

}  // namespace flash::wide
