#include "launch/backward_plan.h"

#include <algorithm>

#include "core/varlen_rows.h"
#include "core/work_tile.h"
#include "launch/device.h"
#include "launch/measuring.h"
#include "launch/plan_cache.h"
#include "launch/plan_text.h"

namespace flash {
namespace {

int resident_tiles(Variant const& variant, DeviceInfo const& device) {
  return plan::resident_backward(cta_size(variant), gpu_size(device));
}

}  // namespace

plan::Problem problem_of(BwdParams const& p, bool deterministic) {
  Seqlens const& s = p.seqlens;
  plan::Problem problem{};
  problem.batch = s.batch;
  problem.seqlen_q = s.seqlen_q;
  problem.seqlen_k = s.seqlen_k;
  problem.varlen_q = s.cu_q != nullptr;
  problem.varlen_k = s.cu_k != nullptr;
  problem.used_k = s.used_k != nullptr;
  problem.total_q = s.cu_q ? s.total_q : int64_t(s.batch) * s.seqlen_q;
  problem.total_k = num_keys(s);
  problem.heads_q = p.heads_q;
  problem.heads_kv = p.heads_kv;
  problem.head_dim = p.head_dim;
  problem.head_dim_v = p.head_dim_v;
  problem.mask = p.mask;
  problem.deterministic = deterministic;
  problem.wants_dq = p.dq.ptr != nullptr;
  return problem;
}

plan::Kernel kernel_of_backward(Variant const& v, DeviceInfo const& device) {
  return kernel_of(v, resident_tiles(v, device));
}

plan::BackwardPlan backward_plan_of(BwdParams const& p, Variant const& variant,
                                    DeviceInfo const& device, bool deterministic) {
  plan::Problem const problem = problem_of(p, deterministic);
  if (records_plans) {
    recorded_plan.put(
        backward_json(problem, machine_of(device), kernel_of_backward(variant, device)));
  }
  if (forced_choice != kPlanned) {
    plan::Kernel const kernel = kernel_of_backward(variant, device);
    return forced(plan::backward_choices(problem, machine_of(device), kernel), forced_choice);
  }
  thread_local PlanCache<plan::BackwardPlan> last_plans;
  return last_plans.of(problem, variant, device, [&] {
    return plan::plan_backward(problem, machine_of(device), kernel_of_backward(variant, device));
  });
}

KvPersistent kv_persistent(BwdParams const& p, Variant const& variant, DeviceInfo const& device) {
  // Up to so many sequences are sorted by length, which takes as many steps for each of them. Among
  // more sequences, the one that runs last is little work anyway.
  constexpr int kMostOrdered = 4096;
  Seqlens const& s = p.seqlens;
  int64_t const rows = s.cu_q ? std::min<int64_t>(s.seqlen_q, s.total_q) : s.seqlen_q;
  int const row_blocks = num_blocks(static_cast<int>(rows), variant.block_m);
  int64_t const sequences = s.cu_k ? VarlenRows::count(s.batch) : s.batch;
  int64_t const items = std::max<int64_t>(sequences * p.heads_kv * p.gqa.splits, 1);
  int64_t const resident = std::min<int64_t>(resident_tiles(variant, device), items);
  return {static_cast<int>(resident), std::max(row_blocks, 1), s.cu_k && s.batch <= kMostOrdered};
}

void follow(plan::BackwardChoice const& choice, Variant const& variant, DeviceInfo const& device,
            bool deterministic, BwdParams& p) {
  plan::Problem const problem = problem_of(p, deterministic);
  p.gqa = GqaSplit::of(problem.group(), choice.heads);
  p.side_by_side = choice.side_by_side;
  p.kv_persistent = choice.schedule == plan::Schedule::KvPersistent
                        ? kv_persistent(p, variant, device)
                        : KvPersistent{};
  if (choice.schedule == plan::Schedule::OrderedDq) {
    bool const computes_delta = plan::computes_delta(problem, variant.head_dim);
    int const before = plan::heads_computed_before(problem, kernel_of_backward(variant, device),
                                                   choice.side_by_side);
    p.ordered_dq = {true, deterministic, computes_delta, before};
  }
  if (choice.row_splits > 1) {
    int const tiles =
        p.seqlens.batch * p.heads_kv * num_blocks(p.seqlens.seqlen_k, variant.block_n);
    p.row_split = RowSplit::last(0, tiles, choice.row_splits);
  }
}

}  // namespace flash
