#include "host/trace.h"

#include <atomic>

#include "host/error.h"
#include "host/plan_text.h"
#include "host/second_tile.h"

namespace flash {
namespace {

std::atomic<TraceListener> listener_{nullptr};

template <class Params>
std::string describe(Params const& p) {
  return concat("b ", p.seqlens.batch, ", ", p.seqlens.cu_q ? "varlen up to " : "",
                p.seqlens.seqlen_q, " x ", p.seqlens.seqlen_k, ", h ", p.heads_q, "/", p.heads_kv,
                ", d ", p.head_dim,
                p.head_dim_v == p.head_dim ? std::string() : concat("/", p.head_dim_v), ", window ",
                p.mask.left, "/", p.mask.right);
}

std::string describe(LastRows const& last) {
  return last.rows > 0 ? concat(", keys of the last ", last.rows, " rows in ", last.parts, " parts")
                       : std::string();
}

// block_n: keys of the row's tile that serves it.
std::string line(std::string const& problem, Variant const& variant, int block_n) {
  return concat(problem, " -> ", variant.name, " (tile ", variant.block_m, "x", block_n, ", ",
                variant.warps, " warps, ", variant.stages, " stages, ", variant.smem_bytes / 1024,
                " KiB shared)");
}

}  // namespace

void trace_to(TraceListener listener) { listener_ = listener; }

void trace_launch(FwdParams const& params, Variant const& variant, LastRows const& last) {
  if (TraceListener const tell = listener_) {
    tell(line(describe(params) + describe(last), variant, keys_of_tile(variant, params)));
  }
}

void trace_launch(BwdParams const& params, Variant const& variant, plan::BackwardPlan const& plan) {
  if (TraceListener const tell = listener_) {
    std::string const text =
        concat(describe(params), ", ", describe(plan.choice, params.group.heads), ", ",
               static_cast<int>(plan.us + 0.5), " us predicted");
    tell(line(text, variant, variant.block_n));
  }
}

}  // namespace flash
