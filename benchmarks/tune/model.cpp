// The cost model (csrc/plan) for ctypes: calls in numbers, their choices, and what they take on a
// machine whose numbers Python changes. No CUDA.
#include <cmath>
#include <string>
#include <vector>

#include "launch/concat.h"
#include "launch/plan_text.h"
#include "plan/machines/nearest.h"
#include "plan/resident.h"

namespace {

using namespace flash::plan;
using flash::concat;
using flash::describe;

struct Call {
  Problem problem;
  // head_dim 0: the call has no such kernel.
  Kernel backward, forward, decode;
};

std::vector<Call> calls;
Machine machine;
std::vector<RowTimes> backward, forward, forward_codes, forward_fp8, decode;
std::string text;

// visit(text, µs, is planned) for each choice, decoding first, as benchmarks/regret lists them.
template <class Visit>
void each_choice(Call const& c, Visit visit) {
  Problem const& p = c.problem;
  if (c.backward.head_dim > 0) {
    BackwardChoice const planned = plan_backward(p, machine, c.backward).choice;
    for (auto const& [choice, us] : backward_choices(p, machine, c.backward)) {
      visit([&] { return describe(choice, p.group()); }, us, choice == planned);
    }
    return;
  }
  ForwardPlan const plan = plan_forward(p, machine, c.forward);
  bool decodes = false;
  if (c.decode.head_dim > 0) {
    DecodePlan const planned = plan_decode(p, machine, c.decode, plan.us);
    decodes = planned.few_q > 0;
    for (auto const& [cut, decode_us] : decode_choices(p, machine, c.decode)) {
      visit([&] { return describe(cut); }, decode_us, decodes && cut == planned.cut);
    }
  }
  for (auto const& [choice, us] : forward_choices(p, machine, c.forward)) {
    visit([&] { return describe(choice, c.forward); }, us, !decodes && choice == plan.choice);
  }
}

// visit(name, float&) for each number; those of kernels as backward/128/128/tiles/fixed.
template <class Visit>
void each_number(Visit visit) {
  Machine& m = machine;
  visit("memory", m.memory), visit("reads", m.reads), visit("sm_reads", m.sm_reads);
  visit("code_reads", m.code_reads);
  visit("launch", m.launch), visit("l2_factor", m.l2_factor);
  visit("search", m.search), visit("next_block", m.next_block);
  visit("cluster_block", m.cluster_block);
  visit("merge_round", m.merge_round), visit("merge_row", m.merge_row);
  visit("merge_wait", m.merge_wait);
  visit("mma_flops", m.mma_flops);
  auto const visit_rows = [&](char const* direction, std::vector<RowTimes>& rows,
                              std::initializer_list<char const*> kernels) {
    for (RowTimes& row : rows) {
      KernelTimes* times = row.kernels;
      for (char const* kernel : kernels) {
        std::string const of = concat(direction, row.head_dim, '/', row.head_dim_v, '/', kernel);
        visit(of + "/fixed", times->fixed), visit(of + "/step", times->step);
        ++times;
      }
    }
  };
  visit_rows("backward/", backward, {"tiles", "kv_persistent", "ordered_dq"});
  visit_rows("forward/", forward, {"first", "second", "packed", "split"});
  visit_rows("forward_codes/", forward_codes, {"first", "second", "packed", "split"});
  visit_rows("forward_fp8/", forward_fp8, {"first", "second"});
  visit_rows("decode/", decode, {"pieces", "codes"});
}

}  // namespace

extern "C" {

// Begins with the machine whose L2 is nearest in size; returns the names of its numbers.
char const* start(int64_t l2_bytes, int sm_count) {
  calls.clear(), text.clear();
  machine = nearest_machine(l2_bytes);
  machine.l2_bytes = l2_bytes;
  machine.sm_count = sm_count > 0 ? sm_count : machine.sm_count;
  backward.assign(machine.backward.begin(), machine.backward.end());
  forward.assign(machine.forward.begin(), machine.forward.end());
  forward_codes.assign(machine.forward_codes.begin(), machine.forward_codes.end());
  forward_fp8.assign(machine.forward_fp8.begin(), machine.forward_fp8.end());
  decode.assign(machine.decode.begin(), machine.decode.end());
  machine.backward = backward, machine.forward = forward, machine.decode = decode;
  machine.forward_codes = forward_codes, machine.forward_fp8 = forward_fp8;
  each_number([](std::string const& name, float) { text += name + '\n'; });
  return text.c_str();
}

int sm_count() { return machine.sm_count; }

void get_numbers(double* to) {
  each_number([&](std::string const&, float& number) { *to++ = number; });
}

void set_numbers(double const* from) {
  each_number([&](std::string const&, float& number) { number = float(*from++); });
}

// Takes a call, in model.py's order, as the next index; returns the texts of its choices.
char const* add(int const* from) {
  auto const take = [&](auto&... to) { (..., (to = *from++)); };
  Call c{};
  Problem& p = c.problem;
  Kernel &b = c.backward, &f = c.forward, &d = c.decode;
  take(p.batch, p.seqlen_q, p.seqlen_k, p.total_q, p.total_k, p.varlen_q, p.cached, p.heads_q);
  take(p.heads_kv, p.head_dim, p.head_dim_v, p.mask.left, p.mask.right, p.deterministic);
  int cluster = 1;  // of the backward or the forward
  take(p.page_size, cluster, b.block_m, b.block_n, b.head_dim, b.head_dim_v, f.head_dim);
  take(f.head_dim_v, f.block_m, f.block_n, f.second_block_n, d.head_dim, d.head_dim_v);
  take(d.block_m, d.block_n, d.rows_at_once, d.resident, d.clusters, d.codes);
  p.codes = f.codes = d.codes;
  p.only_decoded = p.codes && p.page_size % 8 != 0;
  p.varlen_k = p.varlen_q, p.used_k = p.cached, p.cached = p.cached && !p.varlen_q;
  p.page_boxes = p.page_size > 0;
  p.heads_apart = p.whole_rows = p.wants_dq = true;
  b.sm = f.sm = 90, b.plain = f.plain = true;
  b.resident = f.resident = clusters_at_a_time(machine.sm_count, cluster);
  d.resident *= machine.sm_count;
  calls.push_back(c);
  text.clear();
  each_choice(c, [](auto describe, double, bool) { text += describe() + '\n'; });
  return text.c_str();
}

// µs of all choices of the calls `which`, one call after the other, and which are planned.
void predict(int count, int const* which, double* us, bool* planned) {
  for (int i = 0; i < count; ++i) {
    each_choice(calls[which[i]], [&](auto, double predicted, bool is_planned) {
      *us++ = predicted, *planned++ = is_planned;
    });
  }
}
}
