#include "api/launches.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "api/arguments.h"
#include "launch/decode_plan.h"
#include "launch/decode_schedule.h"
#include "launch/device.h"
#include "launch/key_splits.h"
#include "launch/select.h"

namespace flash::api {
namespace {

Variant const& forward_variant(Tensor const& q, FwdParams const& p) {
  DeviceInfo const& device = current_device();
  bool const paged = p.pages.table;
  // Strides that Hopper's loads cannot follow are so rare that the sm80 kernels may serve them.
  int const sm = has_numbered_keys(p) ? device.sm : std::min(device.sm, 80);
  char const* const dtype = p.codes.of_q ? "e4m3" : dtype_name(q, "q");
  return select({paged ? Direction::Paged : Direction::Fwd, dtype, p.head_dim, p.head_dim_v,
                 p.scores.has_score_mods(), sm, device.smem_per_block, page_layout(p),
                 /*softcap=*/0.f, /*max_logits=*/p.max_logits.wanted(), bits_of_keys(p)});
}

// The plan has found a row of one dtype, and the table has the same rows for both.
Variant const& decode_variant(Tensor const& q, FwdParams const& p) {
  return select(request_of(p, decode_direction(p), dtype_name(q, "q"), needs_full_scores(p),
                           current_device()));
}

}  // namespace

KeyCopies copy_odd_rows(FwdParams& p, Tensor const& k, Tensor const& v, Tensor const& q) {
  if (!p.odd.any()) {
    return std::nullopt;
  }
  auto const widened = [](Tensor const& t) {
    return torch::stable::pad(t, {0, in_chunks(t.size(-1)) - t.size(-1)});
  };
  KeyCopies copies{{widened(k), widened(v)}};
  set_keys(p, {copies->first, copies->second, /*of_cache=*/true}, q);
  return copies;
}

ForwardLaunch::ForwardLaunch(Tensor const& q, FwdParams const& p, int64_t num_splits, bool of_cache)
    : variant_(forward_variant(q, p)), first_(variant_, current_device()), params_(p) {
  plan::ForwardPlan const plan =
      forward_plan_of(p, variant_, current_device(), num_splits, of_cache);
  int const splits = plan.choice.splits;
  follow(plan.choice, params_);
  if (splits > 1) {
    splits_.emplace(q, key_splits_workspace(p, splits), ScalarType::Float);
    params_.splits = place_key_splits(p, splits, splits_->data<float>());
  }
  trace_launch(params_, variant_, plan);
}

void ForwardLaunch::start(StreamLock const& lock) const {
  variant_.launch.forward(params_, {current_device(), lock.stream(), variant_.name});
}

DecodeLaunch::DecodeLaunch(Tensor const& q, FwdParams const& p, int64_t num_splits, bool cached,
                           bool beside, NewRows const& rows)
    : variant_(decode_variant(q, p)),
      first_(variant_, current_device()),
      plan_(decode_plan_of(p, current_device(), num_splits, cached)),
      schedule_(decode_schedule(variant_, p, plan_.cut)),
      pieces_(q, decode_workspace(variant_, p, schedule_), ScalarType::Float),
      params_(decode_params(variant_, p, schedule_, pieces_.data<float>(), beside, rows)) {
  trace_launch(p, variant_, plan_);
}

void DecodeLaunch::start(StreamLock const& lock) const {
  variant_.launch.decode(params_, {current_device(), lock.stream(), variant_.name});
}

}  // namespace flash::api
