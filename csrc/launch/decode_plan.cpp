#include "launch/decode_plan.h"

#include <algorithm>
#include <limits>

#include "launch/device.h"
#include "launch/measuring.h"
#include "launch/plan_cache.h"
#include "launch/plan_text.h"
#include "launch/select.h"

namespace flash {
namespace {

// A build for older GPUs alone runs on Hopper as well, without the instructions that clusters need.
bool is_built_for_hopper() {
  static bool const has =
      std::ranges::any_of(variants(), [](Variant const& v) { return v.arch == 90; });
  return has;
}

Direction forward_direction(FwdParams const& p) {
  return p.pages.table ? Direction::Paged : Direction::Fwd;
}

// Whether only decode reads K and V: a latent cache, or codes. Hopper's forward reads codes whose
// descales are numbers of heads, and whose rows are whole chunks of 16 bytes that its loads can
// follow.
bool are_only_decoded(FwdParams const& p, DeviceInfo const& device) {
  return p.q_latent.ptr ||
         (p.codes.used &&
          (device.sm / 10 != 9 || p.codes.k.of_rows || p.codes.v.of_rows || p.odd.any() ||
           !has_numbered_keys(p) ||
           !row_of_plan(forward_direction(p), p, device, p.scores.has_score_mods())));
}

// The forward kernel's predicted time if it computes all; infinite where there is none.
double time_of_forward(plan::Problem const& problem, FwdParams const& p, DeviceInfo const& device,
                       plan::Machine const& machine) {
  Variant const* const row =
      row_of_plan(forward_direction(p), p, device, p.scores.has_score_mods());
  if (!row) {
    return std::numeric_limits<double>::infinity();
  }
  plan::Kernel const kernel = kernel_of_forward(*row, device);
  return plan::plan_forward(problem, machine, kernel).us;
}

// The plan while choices are measured: it is recorded, and another choice can be forced.
plan::DecodePlan measured(plan::DecodePlan const& plan, plan::Problem const& problem,
                          plan::Machine const& machine, plan::Kernel const& kernel) {
  std::vector<plan::DecodeChoice> const all = plan::decode_choices(problem, machine, kernel);
  if (records_plans && !all.empty()) {
    recorded_decode.put(decode_json(all, plan));
  }
  int const index = forced_decode;
  bool const must = problem.only_decoded && index == kNotDecoded;
  if (index == kPlanned || must || all.empty()) {
    return plan;
  }
  if (index == kNotDecoded) {
    return {0, {}, plan.us};
  }
  plan::DecodeChoice const choice = forced(all, index);
  return {plan::decodable_queries(problem), choice.choice, choice.us};
}

}  // namespace

plan::Problem decode_problem_of(FwdParams const& p, DeviceInfo const& device, int64_t num_splits,
                                bool cached) {
  plan::Problem problem = problem_of(p, num_splits, cached);
  problem.beside_decode = false;  // the plan decides it
  problem.only_decoded = are_only_decoded(p, device);
  return problem;
}

plan::Kernel kernel_of_decode(Variant const& v, FwdParams const& p, DeviceInfo const& device) {
  constexpr int kLaneColumns = 4, kWarpsOfClusters = 4;
  int const threads = 32 * v.warps;
  plan::Kernel kernel = kernel_of(v, plan::resident_decode(cta_size(v), gpu_size(device)));
  bool const shared = shares_keys(v);
  kernel.block_n *= shared ? 1 : v.warps;  // a unit: the keys of all warps' steps
  kernel.merges_after = shared && v.arch == 90;
  kernel.rows_at_once = threads * kLaneColumns / v.head_dim_v;
  kernel.clusters =
      device.sm == 90 && is_built_for_hopper() &&
      (shared ? v.arch == 90 : v.is_plain() && v.warps >= kWarpsOfClusters && !p.odd.any());
  return kernel;
}

plan::DecodePlan decode_plan_of(FwdParams const& p, DeviceInfo const& device, int64_t num_splits,
                                bool cached) {
  Variant const* const row = row_of_plan(decode_direction(p), p, device, needs_full_scores(p));
  // Kernels whose warps share keys read whole chunks alone; a forward reads a copy.
  if (!row || (shares_keys(*row) && p.odd.any())) {
    return {};
  }
  plan::Problem const problem = decode_problem_of(p, device, num_splits, cached);
  auto const make = [&] {
    plan::Machine const machine = machine_of(device);
    return plan::plan_decode(problem, machine, kernel_of_decode(*row, p, device),
                             time_of_forward(problem, p, device, machine));
  };
  if (is_measuring()) {
    return measured(make(), problem, machine_of(device), kernel_of_decode(*row, p, device));
  }
  thread_local PlanCache<plan::DecodePlan> last_plans;
  return last_plans.of(problem, *row, device, make);
}

}  // namespace flash
