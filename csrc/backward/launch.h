// The launches of one backward call; what is different from kernel to kernel is handed in.
#pragma once

#include "backward/passes.h"

namespace flash {

// main: starts the kernel between the passes.
template <class Element, class Main>
void launch_with_passes(BwdParams const& params, QueryTile const& tile, LaunchContext const& launch,
                        Main main) {
  launch_preprocess<Element>(params, tile, launch);
  main();
  if (params.dq.ptr && params.workspace.dq && !params.finishes_sums()) {
    launch_query_gradient<Element>(params, tile, launch);
  }
  if (params.group.parts > 1) {
    launch_key_gradients<Element>(params, launch);
  }
  if (params.ds_aux) {
    launch_sink_gradient(params, launch);
  }
}

}  // namespace flash
