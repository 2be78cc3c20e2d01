#include "launch/attention_plan.h"

#include <algorithm>
#include <limits>

#include "launch/device.h"
#include "launch/force.h"
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

// Rows of both dtypes take the same time.
Variant const* row_for(Direction direction, FwdParams const& p, DeviceInfo const& device,
                       bool full) {
  return find({.direction = direction,
               .dtype = "bf16",
               .head_dim = p.head_dim,
               .head_dim_v = p.head_dim_v,
               .full_scores = full,
               .sm = device.sm,
               .smem_per_block = device.smem_per_block,
               .pages = key_layout(p),
               .cached_bits = bits_of_keys(p)});
}

Direction forward_direction(FwdParams const& p) {
  return p.pages.table ? Direction::Paged : Direction::Fwd;
}

// Whether only decode reads K and V: a latent cache, or codes. Hopper's forward reads codes whose
// scales are numbers of heads, and whose rows are whole chunks of 16 bytes that its loads can
// follow.
bool are_only_decoded(FwdParams const& p, DeviceInfo const& device) {
  return p.q_latent.ptr ||
         (p.codes.used && (device.sm / 10 != 9 || p.codes.k.of_rows || p.codes.v.of_rows ||
                           p.odd.any() || !has_numbered_keys(p) ||
                           !row_for(forward_direction(p), p, device, p.scores.has_score_mods())));
}

double forward_us(plan::Problem const& problem, FwdParams const& p, DeviceInfo const& device,
                  plan::Machine const& machine) {
  Variant const* const row = row_for(forward_direction(p), p, device, p.scores.has_score_mods());
  if (!row) {
    return std::numeric_limits<double>::infinity();
  }
  plan::Kernel const kernel = forward_kernel(*row, device);
  return plan::plan_forward(problem, machine, kernel).us;
}

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

plan::Problem problem_of(FwdParams const& p, int64_t num_splits, bool cached) {
  constexpr int kWholeRows = 8;  // rows of Hopper's smallest box of a page
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
  problem.largest_logits = p.max_logits.wanted();
  problem.batch_invariant = p.batch_invariant;
  problem.page_size = paged ? static_cast<int>(p.pages.page_size.divisor) : 0;
  problem.page_boxes = paged && page_layout(p) == PageLayout::Boxes;
  problem.cached = cached;
  problem.odd_rows = p.odd.any();
  problem.codes = p.codes.used;
  problem.heads_apart = p.q.head_stride != 0;
  problem.whole_rows = p.k.whole_rows_apart(kWholeRows) && p.v.whole_rows_apart(kWholeRows);
  problem.num_splits = static_cast<int>(std::min<int64_t>(num_splits, 1 << 30));
  problem.beside_decode = s.few_q > 0;
  return problem;
}

plan::Kernel forward_kernel(Variant const& v, DeviceInfo const& device) {
  int const blocks = v.arch == 90 ? 1 : std::max(blocks_by_shared_memory(v, device), 1);
  return kernel_of(v, plan::clusters_at_a_time(blocks * device.sm_count, v.cluster));
}

plan::Kernel decode_kernel(Variant const& v, FwdParams const& p, DeviceInfo const& device) {
  constexpr int kMostBlocks = 3;  // CTAs of a multiprocessor, by registers
  constexpr int kLaneColumns = 4, kWarpsOfClusters = 4;
  int const threads = 32 * v.warps;
  int const blocks = std::clamp(blocks_by_shared_memory(v, device), 1, kMostBlocks);
  plan::Kernel kernel = kernel_of(v, blocks * device.sm_count);
  bool const shared = shares_keys(v);
  kernel.block_n *= shared ? 1 : v.warps;  // a unit: the keys of all warps' steps
  kernel.merges_after = shared && v.arch == 90;
  kernel.rows_at_once = threads * kLaneColumns / v.head_dim_v;
  kernel.clusters =
      device.sm == 90 && is_built_for_hopper() &&
      (shared ? v.arch == 90 : v.is_plain() && v.warps >= kWarpsOfClusters && !p.odd.any());
  return kernel;
}

plan::Problem decode_problem_of(FwdParams const& p, DeviceInfo const& device, int64_t num_splits,
                                bool cached) {
  plan::Problem problem = problem_of(p, num_splits, cached);
  problem.beside_decode = false;  // the plan decides it
  problem.only_decoded = are_only_decoded(p, device);
  return problem;
}

plan::DecodePlan decode_plan_of(FwdParams const& p, DeviceInfo const& device, int64_t num_splits,
                                bool cached) {
  bool const full = p.scores.has_score_mods() || p.odd.any();
  Variant const* const row = row_for(decode_direction(p), p, device, full);
  // Kernels whose warps share keys read whole chunks alone; a forward reads a copy.
  if (!row || (shares_keys(*row) && p.odd.any())) {
    return {};
  }
  plan::Problem const problem = decode_problem_of(p, device, num_splits, cached);
  auto const make = [&] {
    plan::Machine const machine = machine_of(device);
    return plan::plan_decode(problem, machine, decode_kernel(*row, p, device),
                             forward_us(problem, p, device, machine));
  };
  if (is_measuring()) {
    return measured(make(), problem, machine_of(device), decode_kernel(*row, p, device));
  }
  thread_local PlanCache<plan::DecodePlan> last_plans;
  return last_plans.of(problem, *row, device, make);
}

plan::ForwardPlan forward_plan_of(FwdParams const& p, Variant const& variant,
                                  DeviceInfo const& device, int64_t num_splits, bool cached) {
  plan::Problem const problem = problem_of(p, num_splits, cached);
  if (is_measuring()) {
    return measured(problem, machine_of(device), forward_kernel(variant, device));
  }
  thread_local PlanCache<plan::ForwardPlan> last_plans;
  return last_plans.of(problem, variant, device, [&] {
    return plan::plan_forward(problem, machine_of(device), forward_kernel(variant, device));
  });
}

void follow(plan::ForwardChoice const& choice, FwdParams& p) {
  p.tile = choice.tile;
  p.side_by_side = choice.side_by_side;
  // Under a causal mask the last row block sees most keys.
  p.longest_first = problem_of(p, 0, false).limits_right();
}

}  // namespace flash
