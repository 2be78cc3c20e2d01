// The launches of one backward call behind its main kernel.
#pragma once

#include "passes/backward/passes.h"

namespace flash {

template <class Element>
void launch_passes_behind(BwdParams const& params, QueryTile const& tile,
                          LaunchContext const& launch) {
  if (params.dq.ptr && params.workspace.dq && !params.finishes_sums()) {
    launch_query_gradient<Element>(params, tile, launch);
  }
  if (params.gqa.splits > 1) {
    launch_key_gradients<Element>(params, launch);
  }
  if (params.ds_aux) {
    launch_sink_gradient(params, launch);
  }
}

}  // namespace flash
