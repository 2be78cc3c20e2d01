#include "launch/forward_plan.h"

#include <algorithm>

#include "launch/device.h"
#include "launch/measuring.h"
#include "launch/plan_cache.h"
#include "launch/plan_text.h"
#include "launch/select.h"

namespace flash {
namespace {

// The plan while choices are measured: it is recorded, and another choice can be forced.
plan::ForwardPlan measured(plan::Problem const& problem, plan::Machine const& machine,
                           plan::Kernel const& kernel) {
  if (records_plans) {
    recorded_plan.put(forward_json(problem, machine, kernel));
  }
  if (forced_choice == kPlanned) {
    return plan::plan_forward(problem, machine, kernel);
  }
  return forced(plan::forward_choices(problem, machine, kernel), forced_choice);
}

}  // namespace

Variant const* row_of_plan(Direction direction, FwdParams const& p, DeviceInfo const& device,
                           bool full) {
  return find(request_of(p, direction, "bf16", full, device));
}

plan::Problem problem_of(FwdParams const& p, int64_t num_splits, bool cached) {
  Seqlens const& s = p.seqlens;
  bool const paged = p.pages.table != nullptr, varlen_k = s.cu_k && !paged;
  plan::Problem problem{};
  problem.batch = s.batch;
  problem.seqlen_q = s.seqlen_q;
  problem.seqlen_k = s.seqlen_k;
  problem.total_q = s.cu_q ? s.total_q : int64_t(s.batch) * s.seqlen_q;
  problem.total_k = varlen_k ? s.total_k : int64_t(s.batch) * s.seqlen_k;
  problem.varlen_q = s.cu_q != nullptr;
  problem.varlen_k = varlen_k;
  problem.used_k = s.used_k || s.leftpad_k || s.batch_k || (s.cu_k && paged);
  problem.heads_q = p.heads_q;
  problem.heads_kv = p.heads_kv;
  problem.head_dim = p.head_dim;
  problem.head_dim_v = p.head_dim_v;
  problem.mask = p.mask;
  problem.dropout = p.scores.dropout_p > 0.f;
  problem.max_logits = p.max_logits.wanted();
  problem.batch_invariant = p.batch_invariant;
  problem.page_size = paged ? static_cast<int>(p.pages.page_size.divisor) : 0;
  problem.page_boxes = paged && page_layout(p) == PageLayout::Boxes;
  problem.cached = cached;
  problem.odd_rows = p.odd.any();
  problem.codes = p.codes.used;
  problem.heads_apart = p.q.head_stride != 0;
  problem.whole_rows = p.k.whole_rows_apart(kLeastBoxRows) && p.v.whole_rows_apart(kLeastBoxRows);
  problem.num_splits = static_cast<int>(std::min<int64_t>(num_splits, 1 << 30));
  problem.beside_decode = s.few_q > 0;
  return problem;
}

plan::Kernel kernel_of_forward(Variant const& v, DeviceInfo const& device) {
  return kernel_of(v, plan::resident_forward(v.arch == 90, cta_size(v), gpu_size(device)));
}

plan::ForwardPlan forward_plan_of(FwdParams const& p, Variant const& variant,
                                  DeviceInfo const& device, int64_t num_splits, bool cached) {
  plan::Problem const problem = problem_of(p, num_splits, cached);
  if (is_measuring()) {
    return measured(problem, machine_of(device), kernel_of_forward(variant, device));
  }
  thread_local PlanCache<plan::ForwardPlan> last_plans;
  return last_plans.of(problem, variant, device, [&] {
    return plan::plan_forward(problem, machine_of(device), kernel_of_forward(variant, device));
  });
}

void follow(plan::ForwardChoice const& choice, FwdParams& p) {
  p.tile = choice.tile;
  p.side_by_side = choice.side_by_side;
  // Under a causal mask the last row block sees most keys.
  p.longest_first = problem_of(p, 0, false).limits_right();
}

}  // namespace flash
