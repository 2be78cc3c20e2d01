#include <cutlass/numeric_types.h>

#include <algorithm>
#include <string_view>

#include "launch/launch_kernel.h"
#include "passes/rotary/kernel.h"

namespace flash {
namespace {

template <class T>
bool aligned(TensorView<T> const& x, int64_t elements, int64_t bytes_each) {
  return reinterpret_cast<uintptr_t>(x.ptr) % (elements * bytes_each) == 0 &&
         x.batch_stride % elements == 0 && x.row_stride % elements == 0 &&
         x.head_stride % elements == 0;
}

// Whether all heads are whole runs of `run` elements that begin where such runs may.
bool takes_runs(RotaryParams const& p, int run, int64_t element_bytes) {
  int64_t const table_bytes = p.wide_tables ? sizeof(float) : element_bytes;
  return p.half % run == 0 && (p.in_place || p.head_dim % run == 0) &&
         std::all_of(std::begin(p.parts), std::end(p.parts), [&](RotaryHeads const& part) {
           return aligned(part.x, run, element_bytes) && aligned(part.out, run, element_bytes) &&
                  aligned(part.cos, run / 2, table_bytes) &&
                  aligned(part.sin, run / 2, table_bytes);
         });
}

template <class Element, int kRun>
void launch_runs(RotaryParams const& p, LaunchContext const& launch) {
  using namespace rotary;
  int const items = num_items(p, kRun);
  int head_sets = 0;
  for (RotaryHeads const& part : p.parts) {
    head_sets += num_head_sets(part);
  }
  if (items * head_sets == 0) {
    return;
  }
  int const tokens = std::max(1, kThreads / (items * head_sets));
  Shares const shares{FastDiv(items), FastDiv(items * head_sets),
                      FastDiv(std::max(1, p.places.seqlen)), tokens};
  launch_kernel<rotary_kernel<Element, kRun>>(
      launch, {(p.tokens + tokens - 1) / tokens, kThreads, 0}, p, shares);
}

template <class Element>
void launch_of(RotaryParams const& p, LaunchContext const& launch) {
  constexpr int kRun = 16 / sizeof(Element);
  (takes_runs(p, kRun, sizeof(Element)) ? launch_runs<Element, kRun>
                                        : launch_runs<Element, 1>)(p, launch);
}

}  // namespace

void launch_rotary(RotaryParams const& params, char const* dtype, LaunchContext const& launch) {
  std::string_view const name(dtype);
  auto const launch_it = name == "bf16"   ? launch_of<cutlass::bfloat16_t>
                         : name == "fp16" ? launch_of<cutlass::half_t>
                                          : launch_of<float>;
  launch_it(params, launch);
}

}  // namespace flash
