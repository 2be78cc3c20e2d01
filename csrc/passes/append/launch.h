// Launches one instantiation; included by the generated files only.
#pragma once

#include <limits>

#include "launch/launch_kernel.h"
#include "passes/append/kernel.h"

namespace flash::append {

template <class Config>
void launch_append(AppendParams const& p, LaunchContext const& launch) {
  constexpr int64_t most = std::numeric_limits<int>::max();
  check(p.queries <= most && p.keys <= most, "k and q have ", p.keys, " and ", p.queries,
        " rows of a head; an append of at most ", most, " is served");
  int64_t const blocks = (p.queries + 2 * p.keys + Config::kRows - 1) / Config::kRows;
  launch_kernel<append_kernel<Config>>(launch, {blocks, Config::kThreads, 0}, p);
}

}  // namespace flash::append
