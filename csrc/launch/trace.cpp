#include "launch/trace.h"

#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "launch/device.h"
#include "launch/error.h"
#include "launch/plan_text.h"

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

// block_n: keys of the row's tile that serves it.
std::string line(std::string const& problem, Variant const& variant, int block_n) {
  return concat(problem, " -> ", variant.name, " (tile ", variant.block_m, "x", block_n, ", ",
                variant.warps, " warps, ", variant.stages, " stages, ", variant.smem_bytes / 1024,
                " KiB shared)");
}

bool is_first(Variant const& variant, int device) {
  static std::mutex asking;
  static std::set<std::pair<Variant const*, int>> seen;
  std::scoped_lock const lock(asking);
  return seen.emplace(&variant, device).second;
}

std::string how_loaded(int sm) {
  switch (device_code(sm)) {
    case DeviceCode::Native:
      return "machine code was loaded";
    case DeviceCode::Ptx:
      return concat("the driver compiled PTX for sm_", sm);
    default:
      return concat("neither machine code nor PTX for sm_", sm);
  }
}

std::string microseconds(double us) { return concat(static_cast<int>(us + 0.5), " us predicted"); }

}  // namespace

void trace_to(TraceListener listener) { listener_ = listener; }

void trace_launch(FwdParams const& params, Variant const& variant) {
  if (TraceListener const tell = listener_) {
    tell(line(describe(params), variant, variant.block_n));
  }
}

void trace_launch(FwdParams const& params, Variant const& variant, plan::DecodePlan const& plan) {
  if (TraceListener const tell = listener_) {
    std::string const text =
        concat(describe(params), ", ", describe(plan.cut), ", ", microseconds(plan.us));
    tell(line(text, variant, variant.block_n));
  }
}

void trace_launch(FwdParams const& params, Variant const& variant, plan::ForwardPlan const& plan) {
  if (TraceListener const tell = listener_) {
    plan::Kernel const kernel = kernel_of(variant, /*resident=*/0);
    std::string const text =
        concat(describe(params), ", ", describe(plan.choice, kernel), ", ", microseconds(plan.us));
    tell(line(text, variant, kernel.block_n_of(plan.choice.tile)));
  }
}

void trace_launch(BwdParams const& params, Variant const& variant, plan::BackwardPlan const& plan) {
  if (TraceListener const tell = listener_) {
    std::string const text = concat(describe(params), ", ", describe(plan.choice, params.gqa.heads),
                                    ", ", microseconds(plan.us));
    tell(line(text, variant, variant.block_n));
  }
}

FirstLaunch::FirstLaunch(Variant const& variant, DeviceInfo const& device)
    : variant_(listener_.load() && is_first(variant, device.index) ? &variant : nullptr),
      sm_(device.sm) {
  if (variant_) {
    begin_ = std::chrono::steady_clock::now();
  }
}

FirstLaunch::~FirstLaunch() {
  TraceListener const tell = listener_;
  if (variant_ && tell) {
    std::chrono::duration<double, std::milli> const took =
        std::chrono::steady_clock::now() - begin_;
    tell(concat(variant_->name, ": first launch took ", static_cast<int>(took.count() + 0.5),
                " ms: ", how_loaded(sm_)));
  }
}

}  // namespace flash
