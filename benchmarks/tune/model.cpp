// The cost model (csrc/plan) for ctypes: calls in numbers, their choices, and what they take on a
// machine whose numbers Python changes. No CUDA.
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "launch/plan_text.h"
#include "params/row_split.h"
#include "plan/machines/nearest.h"

namespace {

using namespace flash::plan;
using flash::describe;

enum Direction { kBackward, kForward, kCache };

// As model.py packs it.
struct Call {
  int64_t direction, batch, seqlen_q, seqlen_k, total_q, packed, heads_q, heads_kv, head_dim,
      head_dim_v, left, right, deterministic, page;
  int64_t kernel_dim, kernel_dim_v, block_m, block_n, second_block_n, pair;    // row of the table
  int64_t decode_dim, decode_dim_v, decode_block_m, decode_block_n, decode_warps;  // 0: no row
};

std::vector<Call> calls;
Machine machine;
std::vector<BackwardTimes> backward;
std::vector<ForwardTimes> forward;
std::vector<DecodeTimes> decode;

Problem problem_of(Call const& c) {
  bool const cache = c.direction == kCache;
  Problem p{};
  p.batch = int(c.batch);
  p.seqlen_q = int(c.seqlen_q);
  p.seqlen_k = int(c.seqlen_k);
  p.total_q = c.total_q;
  p.total_k = c.packed ? c.total_q : c.batch * c.seqlen_k;
  p.packed_q = p.packed_k = c.packed;
  p.used_k = p.cached = cache;
  p.heads_q = int(c.heads_q);
  p.heads_kv = int(c.heads_kv);
  p.head_dim = int(c.head_dim);
  p.head_dim_v = int(c.head_dim_v);
  p.mask = {int(c.left), int(c.right)};
  p.keys = c.page ? KeyLayout::PageBoxes : KeyLayout::Rows;
  p.page_size = int(c.page);
  p.heads_apart = p.whole_rows = true;
  p.deterministic = c.deterministic;
  p.wants_dq = p.wants_dk = p.wants_dv = true;
  return p;
}

BackwardKernel backward_kernel(Call const& c) {
  int const d = int(c.kernel_dim), dv = int(c.kernel_dim_v);
  int const resident = machine.sm_count / (c.pair ? 2 : 1);
  return {int(c.block_m), int(c.block_n), d, dv, resident, true, false, true,
          flash::has_row_split(d, dv, true)};
}

ForwardKernel forward_kernel(Call const& c) {
  return {90, int(c.kernel_dim), int(c.kernel_dim_v), int(c.block_m), int(c.block_n),
          int(c.second_block_n), true, 1};
}

DecodeKernel decode_kernel(Call const& c) {
  constexpr int kLaneColumns = 4, kMergedRows = 320, kBlocks = 3, kWarpsOfClusters = 4;
  int const dv = int(c.decode_dim_v), warps = int(c.decode_warps);
  return {int(c.decode_dim), dv, int(c.decode_block_m), int(c.decode_block_n) * warps,
          32 * warps * kLaneColumns / dv, kMergedRows, kBlocks, warps >= kWarpsOfClusters};
}

// visit(text, µs, is planned) for each choice, decoding first, as benchmarks/regret lists them.
template <class Visit>
void each_choice(Call const& c, Visit visit) {
  Problem const p = problem_of(c);
  if (c.direction == kBackward) {
    BackwardKernel const kernel = backward_kernel(c);
    std::array<BackwardChoice, kMostBackwardChoices> all;
    int const count = backward_choices(p, kernel, all.data());
    BackwardChoice const planned = plan_backward(p, machine, kernel).choice;
    for (int i = 0; i < count; ++i) {
      visit([&] { return describe(all[i], p.group()); }, backward_us(p, machine, kernel, all[i]),
            all[i] == planned);
    }
    return;
  }
  ForwardKernel const kernel = forward_kernel(c);
  Problem const usual = expected(p);
  ForwardPlan const plan = plan_forward(usual, machine, kernel);
  bool decodes = false, decodable = c.direction == kCache && c.decode_dim > 0;
  if (decodable) {
    DecodeKernel const row = decode_kernel(c);
    std::array<DecodeChoice, kMostDecodeChoices> all;
    int const count = decode_choices(p, machine, row, all.data());
    double const us = std::sqrt(plan.us * forward_us(p, machine, kernel, plan.choice));
    DecodePlan const planned = plan_decode(p, machine, row, us);
    decodable = count > 0;
    decodes = decodable && planned.few_q > 0;
    for (int i = 0; i < count; ++i) {
      visit([&] { return describe(all[i].split); }, all[i].us,
            decodes && all[i].split == planned.split);
    }
  }
  std::array<ForwardChoice, kMostForwardChoices> all;
  int const count = forward_choices(usual, machine, kernel, all.data());
  for (int i = 0; i < count; ++i) {
    double const us = forward_us(usual, machine, kernel, all[i]);
    double const full = decodable ? forward_us(p, machine, kernel, all[i]) : us;
    visit([&] { return describe(all[i], kernel); }, std::sqrt(us * full),
          !decodes && all[i] == plan.choice);
  }
}

// visit(name, float&) for each number that is fitted; times as direction/d/dv/kernel/begin.
template <class Visit>
void each_number(Visit visit) {
  Machine& m = machine;
  visit("memory", m.memory), visit("reads", m.reads), visit("sm_reads", m.sm_reads);
  visit("l2_gain", m.l2_gain), visit("launch", m.launch), visit("l2_share", m.l2_share);
  visit("mma_flops", m.mma_flops);
  auto const times = [&](auto const& row, std::string const& kernel, KernelTimes& of) {
    std::string const dims = std::to_string(row.head_dim) + '/' + std::to_string(row.head_dim_v);
    auto const slash = kernel.find('/');
    std::string const name = kernel.substr(0, slash + 1) + dims + kernel.substr(slash);
    visit(name + "/begin", of.begin), visit(name + "/step", of.step);
  };
  for (BackwardTimes& row : backward) {
    times(row, "backward/tiles", row.tiles), times(row, "backward/kv_persistent", row.kv_persistent);
    times(row, "backward/ordered_dq", row.ordered_dq);
  }
  for (ForwardTimes& row : forward) {
    times(row, "forward/first", row.first), times(row, "forward/second", row.second);
    times(row, "forward/packed", row.packed), times(row, "forward/split", row.split);
  }
  for (DecodeTimes& row : decode) {
    times(row, "decode/pieces", row.pieces);
  }
}

std::string text;

}  // namespace

extern "C" {

// Begins with the numbers of the machine whose L2 is nearest in size; returns their names.
char const* start(int64_t l2_bytes, int sm_count) {
  calls.clear();
  machine = nearest_machine(l2_bytes);
  machine.l2_bytes = l2_bytes;
  machine.sm_count = sm_count > 0 ? sm_count : machine.sm_count;
  backward.assign(machine.backward.begin(), machine.backward.end());
  forward.assign(machine.forward.begin(), machine.forward.end());
  decode.assign(machine.decode.begin(), machine.decode.end());
  machine.backward = backward, machine.forward = forward, machine.decode = decode;
  text.clear();
  each_number([](std::string const& name, float) { text += name + '\n'; });
  return text.c_str();
}

int sm_count() { return machine.sm_count; }
int smem_per_block() { return machine.smem_per_block; }

void get_numbers(double* to) {
  each_number([&](std::string const&, float& number) { *to++ = number; });
}

void set_numbers(double const* from) {
  each_number([&](std::string const&, float& number) { number = float(*from++); });
}

// Takes a call, as the next index; returns the texts of its choices.
char const* add(int64_t const* numbers) {
  calls.push_back(*reinterpret_cast<Call const*>(numbers));
  text.clear();
  each_choice(calls.back(), [](auto describe, double, bool) { text += describe() + '\n'; });
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
