// The Python module: runs a variant of the table on the host.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "banks.h"
#include "call.h"
#include "launch/backward_plan.h"
#include "launch/clusters.h"
#include "launch/decode_plan.h"
#include "launch/decode_schedule.h"
#include "launch/device.h"
#include "launch/key_splits.h"
#include "launch/launch_kernel.h"
#include "launch/select.h"
#include "launch/workspace.h"
#include "launch_log.h"
#include "passes/probabilities/launch.h"

extern "C" bool take_clean_counters();  // hopper/driver.cpp

namespace {

void check_counters() {
  if (!take_clean_counters()) {
    throw std::logic_error("counters are not left at 0");
  }
}

// Few SMs, so that persistent kernels have more than one tile.
flash::DeviceInfo const sm80{0, 80, 40 << 20, 166912, 4};
flash::DeviceInfo const sm90{0, 90, 50 << 20, 232448, 3};

// How many thread blocks a call has run side by side; 1: one after the other.
flash::SideBySide side_by_side(py::dict const& call) {
  return {number<int>(call, "side_by_side", 1), number<uint64_t>(call, "seed")};
}

// With a multiprocessor for each block that runs side by side with others.
flash::DeviceInfo running_device(flash::DeviceInfo device, py::dict const& call) {
  if (int const blocks = side_by_side(call).blocks; blocks > 1) {
    device.sm_count = blocks;
    device.l2_bytes = number<int64_t>(call, "l2_bytes", device.l2_bytes);
  }
  return device;
}

flash::BwdParams backward_params(py::dict const& call) {
  auto p = params<flash::BwdParams>(call);
  p.out = view<void const>(call, "out");
  p.dout = view<void const>(call, "dout");
  p.dlse = rows(call, "dlse");
  p.softmax_d = rows(call, "softmax_d");
  for (auto const& [name, gradient] : {std::pair{"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}}) {
    if (call.contains(name)) {
      *gradient = view<void>(call, name);
    }
  }
  p.ds_aux = pointer<float>(call, "ds_aux");
  return p;
}

// Scratch memory, full of what must not be counted on, with a margin that must not change.
template <class T>
class Scratch {
 public:
  Scratch(int64_t size, T poison) : poison_(poison), memory_(kMargin + size + kMargin, poison) {}

  T* data() { return memory_.data() + kMargin; }

  void check() const {
    auto const same = [&](T x) { return std::memcmp(&x, &poison_, sizeof(T)) == 0; };
    if (!std::all_of(memory_.begin(), memory_.begin() + kMargin, same) ||
        !std::all_of(memory_.end() - kMargin, memory_.end(), same)) {
      throw std::logic_error("a kernel writes around its workspace");
    }
  }

 private:
  static constexpr int kMargin = 64;
  T poison_;
  std::vector<T> memory_;
};

void run_backward(flash::Variant const& variant, py::dict const& call,
                  flash::LaunchContext const& launch) {
  flash::BwdParams p = backward_params(call);
  int const group = std::max(p.heads_q / std::max(p.heads_kv, 1), 1);
  p.gqa = flash::GqaSplit::of(group, number<int>(call, "split_heads", group));
  if (number<bool>(call, "kv_persistent")) {
    p.kv_persistent = flash::kv_persistent(p, variant, launch.device);
    p.kv_persistent.resident = launch.device.sm_count / variant.cluster;  // several
  }
  bool const deterministic = number<bool>(call, "deterministic");
  p.side_by_side = number<int>(call, "together", 3);
  int const before = flash::plan::heads_computed_before(
      flash::problem_of(p, deterministic), flash::kernel_of_backward(variant, launch.device),
      p.side_by_side);
  p.ordered_dq = {number<bool>(call, "ordered_dq"), deterministic,
                  number<bool>(call, "computes_delta"), before};
  if (int const splits = number<int>(call, "row_splits", 1); splits > 1) {
    int const tiles =
        p.seqlens.batch * p.heads_kv * flash::num_blocks(p.seqlens.seqlen_k, variant.block_n);
    int const count = std::min(number<int>(call, "split_tiles", 1), tiles);
    p.row_split = flash::RowSplit::last(tiles - count, count, splits);
  }
  auto const size = flash::workspace_size(p, variant, deterministic);
  float const nan = std::numeric_limits<float>::quiet_NaN();
  Scratch<float> dq(size.dq, nan), stats(size.stats, nan), split_sums(size.split_sums, nan);
  Scratch<int> dq_semaphores(size.dq_semaphores, -1), deltas_done(size.deltas_done, -1),
      order(size.order, -1);
  p.workspace = {size.dq ? dq.data() : nullptr, stats.data(),
                 size.dq_semaphores ? dq_semaphores.data() : nullptr,
                 size.deltas_done ? deltas_done.data() : nullptr,
                 size.order ? order.data() : nullptr};
  flash::place_split_sums(p, variant, split_sums.data());
  variant.launch.backward(p, launch);
  dq.check();
  stats.check();
  split_sums.check();
  dq_semaphores.check();
  deltas_done.check();
  order.check();
}

flash::Variant const& find(std::string const& name) {
  for (flash::Variant const& variant : flash::variants()) {
    if (name == variant.name) {
      return variant;
    }
  }
  throw py::value_error("no variant " + name);
}

// The planned choice, but for what the call says: tile, key_splits, together (heads).
flash::plan::ForwardChoice forward_choice(flash::FwdParams const& p, py::dict const& call,
                                          flash::Variant const& variant,
                                          flash::DeviceInfo const& device) {
  auto choice = flash::forward_plan_of(p, variant, device, number<int>(call, "num_splits", 1),
                                       /*cached=*/false)
                    .choice;
  if (call.contains("tile")) {
    choice = {flash::ForwardTile(number<int>(call, "tile")), 1, choice.side_by_side};
  }
  if (int const splits = number<int>(call, "key_splits", 1); splits > 1) {
    choice = {flash::ForwardTile::Split, splits, choice.side_by_side};
  }
  choice.side_by_side = number<int>(call, "together", choice.side_by_side);
  return choice;
}

void run_forward(py::dict const& call, flash::Variant const& variant,
                 flash::LaunchContext const& launch) {
  flash::FwdParams p = forward_params(call);
  flash::plan::ForwardChoice const choice = forward_choice(p, call, variant, launch.device);
  flash::follow(choice, p);
  Scratch<float> workspace(flash::key_splits_workspace(p, choice.splits),
                           std::numeric_limits<float>::quiet_NaN());
  if (choice.splits > 1) {
    p.splits = flash::place_key_splits(p, choice.splits, workspace.data());
  }
  variant.launch.forward(p, launch);
  workspace.check();
}

void run(std::string const& name, py::dict const& call) {
  flash::last_block_first = number<bool>(call, "last_block_first");
  flash::Variant const& variant = find(name);
  // Another for each call, but the same whenever it is repeated.
  simt::first_order = std::hash<std::string>{}(name) + number<int>(call, "seqlen_q") +
                      3 * number<int>(call, "seqlen_k") + number<int>(call, "left", -1);
  flash::RunSideBySide const so(side_by_side(call));
  flash::DeviceInfo const device = running_device(variant.arch == 90 ? sm90 : sm80, call);
  flash::LaunchContext const launch{device, nullptr, variant.name};
  if (variant.launch.backward) {
    flash::DeviceInfo several = launch.device;
    if (side_by_side(call).blocks == 1) {  // as many clusters as CTAs of other rows
      several.sm_count *= variant.cluster;
    }
    run_backward(variant, call, {several, launch.stream, launch.name});
  } else {
    run_forward(call, variant, launch);
  }
  check_counters();
}

void probabilities(std::string const& dtype, py::dict const& call) {
  flash::launch_probabilities(forward_params(call), dtype.c_str(), pointer<void>(call, "s_dmask"),
                              {sm80, nullptr, "probabilities"});
}

// The name of the row that serves a forward call, and why each of the others does not. page_size:
// of keys in pages, else 0.
py::tuple select_forward(std::string const& dtype, int head_dim, int head_dim_v, bool full_scores,
                         int sm, int smem_per_block, int page_size, bool max_logits) {
  flash::Direction const direction = page_size ? flash::Direction::Paged : flash::Direction::Fwd;
  flash::Selection const selection =
      flash::explain({direction, dtype.c_str(), head_dim, head_dim_v, full_scores, sm,
                      smem_per_block, flash::page_layout(page_size), /*softcap=*/0.f, max_logits});
  py::dict rejected;
  for (flash::Rejection const& r : selection.rejected) {
    rejected[r.variant->name] = r.why;
  }
  return py::make_tuple(selection.variant ? selection.variant->name : "", rejected);
}

// What a backward on a Hopper GPU is planned to be, and µs.
py::dict plan_backward(std::string const& name, py::dict const& call, int sm_count, int l2_mib) {
  flash::DeviceInfo device = sm90;
  device.sm_count = sm_count;
  device.l2_bytes = int64_t(l2_mib) << 20;
  auto p = params<flash::BwdParams>(call);
  static float something = 0;  // of gradients it counts whether they are wanted
  p.dq.ptr = &something;
  if (call.contains("dq")) {
    p.dq = view<void>(call, "dq");
  }
  p.dk.ptr = p.dv.ptr = &something;
  flash::plan::BackwardPlan const plan =
      flash::backward_plan_of(p, find(name), device, number<bool>(call, "deterministic"));
  constexpr char const* schedules[] = {"tiles", "kv_persistent", "ordered_dq"};
  py::dict result;
  result["schedule"] = schedules[static_cast<int>(plan.choice.schedule)];
  result["heads"] = plan.choice.heads;
  result["row_splits"] = plan.choice.row_splits;
  result["together"] = plan.choice.side_by_side;
  result["us"] = plan.us;
  return result;
}

// What a forward on a Hopper GPU is planned to be, and µs.
py::dict plan_forward(std::string const& name, py::dict const& call, int sm_count) {
  flash::DeviceInfo device = sm90;
  device.sm_count = sm_count;
  device.l2_bytes = 60 << 20;
  auto const plan = flash::forward_plan_of(forward_params(call), find(name), device,
                                           number<int>(call, "num_splits"), /*cached=*/false);
  constexpr char const* tiles[] = {"first", "second", "packed", "split"};
  py::dict result;
  result["tile"] = tiles[static_cast<int>(plan.choice.tile)];
  result["splits"] = plan.choice.splits;
  result["side_by_side"] = plan.choice.side_by_side;
  result["us"] = plan.us;
  return result;
}

// Whether the results of so many splits are merged all splits of a row at once.
bool merges_at_once(py::dict const& call) {
  flash::FwdParams p = forward_params(call);
  p.splits.count = flash::FastDiv(number<int>(call, "key_splits"));
  return flash::merges_at_once(p);
}

flash::DeviceInfo gpu_of(int sm, int sm_count) {
  flash::DeviceInfo device = sm == 90 ? sm90 : sm80;
  device.sm = sm;
  device.sm_count = sm_count;
  device.l2_bytes = 60 << 20;
  return device;
}

// The queries of a sequence up to which a packed batch decodes it; -1: all of them.
int few_queries(py::dict const& call, int num_splits, int sm, int sm_count) {
  int const few = flash::decode_plan_of(forward_params(call), gpu_of(sm, sm_count), num_splits,
                                        /*cached=*/false)
                      .few_q;
  return few == flash::kAllQueries ? -1 : few;
}

// num_splits None: a dense call without a cache.
bool decodes(py::dict const& call, std::optional<int> num_splits, int sm, int sm_count) {
  flash::FwdParams const p = forward_params(call);
  flash::DeviceInfo const device = gpu_of(sm, sm_count);
  return flash::decode_plan_of(p, device, num_splits.value_or(0), num_splits.has_value()).few_q > 0;
}

// What a call brings to a cache.
flash::NewRows new_rows(py::dict const& call) {
  flash::NewRows rows{};
  rows.q = view<void const>(call, "q");
  if (call.contains("q_rotated")) {
    rows.q_rotated = view<void>(call, "q_rotated");
  }
  rows.k = view<void const>(call, "k_new");
  rows.v = view<void const>(call, "v_new");
  rows.k_cache = view<void>(call, "k");
  rows.v_cache = view<void>(call, "v");
  rows.odd = call.contains("odd_columns_k");
  rows.codes = code_descales(call);
  rows.columns_k = number<int>(call, rows.odd ? "odd_columns_k" : "head_dim");
  rows.columns_v = number<int>(call, rows.odd ? "odd_columns_v" : "head_dim_v");
  rows.rotary = {pointer<void>(call, "cos"),          pointer<void>(call, "sin"),
                 number<int64_t>(call, "cos_stride"), number<int64_t>(call, "sin_stride"),
                 number<int>(call, "positions"),      number<int>(call, "rotary_dim"),
                 number<bool>(call, "interleaved"),   number<bool>(call, "advance_q")};
  return rows;
}

// New keys to a cache, and q turned, as csrc/api/kvcache.cpp does it.
void run_append(std::string const& name, py::dict const& call) {
  flash::FwdParams const p = forward_params(call);
  flash::AppendParams n{};
  n.rows = new_rows(call);
  n.pages = p.pages;
  n.seqlens = p.seqlens;
  n.seqlen_q = flash::FastDiv(p.seqlens.seqlen_q);
  n.new_k = flash::FastDiv(p.seqlens.new_k);
  n.heads_q = flash::FastDiv(p.heads_q);
  n.heads_kv = flash::FastDiv(p.heads_kv);
  int64_t const batch = p.seqlens.batch;
  n.queries = n.rows.rotary.cos ? batch * p.seqlens.seqlen_q * p.heads_q : 0;
  n.keys = batch * p.seqlens.new_k * p.heads_kv;
  n.head_dim = p.head_dim;
  flash::Variant const& variant = find(name);
  variant.launch.append(n, {sm80, nullptr, variant.name});
}

// An sm80 GPU, or one of Hopper's with so many multiprocessors.
flash::DeviceInfo decoding_device(py::dict const& call) {
  int const sm_count = number<int>(call, "hopper_sms");
  flash::DeviceInfo device = sm_count > 0 ? sm90 : sm80;
  device.sm_count = sm_count > 0 ? sm_count : sm80.sm_count;
  return device;
}

// A tile is shared by call["cluster"] thread blocks, or cut as is planned for the GPU, were there
// no other kernel.
flash::PieceSchedule schedule_of(flash::Variant const& variant, flash::FwdParams const& p,
                                 py::dict const& call) {
  if (int const cluster = number<int>(call, "cluster", 1); cluster > 1) {
    return flash::decode_schedule(variant, p,
                                  {.cluster_log2 = std::countr_zero(unsigned(cluster))});
  }
  flash::DeviceInfo const device = decoding_device(call);
  bool const cached = p.seqlens.cu_q == nullptr;
  flash::plan::Problem const problem = flash::problem_of(p, call["num_splits"].cast<int>(), cached);
  flash::plan::Kernel kernel = flash::kernel_of_decode(variant, p, device);
  kernel.clusters = false;
  auto const plan = flash::plan::plan_decode(problem, flash::machine_of(device), kernel,
                                             std::numeric_limits<double>::infinity());
  return flash::decode_schedule(variant, p, plan.cut);
}

// Pieces that were counted in the workspace of their call, since that was asked last.
int64_t own_counters = 0;

// Few query rows against a cache, as csrc/api/kvcache.cpp does it.
void run_decode(std::string const& name, py::dict const& call) {
  flash::last_block_first = number<bool>(call, "last_block_first");
  flash::Variant const& variant = find(name);
  flash::FwdParams p = forward_params(call);
  flash::NewRows rows{};
  if (call.contains("k_new")) {
    rows = new_rows(call);
    if (!flash::decode_appends(p, rows)) {
      throw std::invalid_argument("these new rows have a launch of their own");
    }
  }
  auto const schedule = schedule_of(variant, p, call);
  float const nan = std::numeric_limits<float>::quiet_NaN();
  Scratch<float> workspace(flash::decode_workspace(variant, p, schedule), nan);
  auto const params = flash::decode_params(variant, p, schedule, workspace.data(), false, rows);
  int64_t const own = params.counters ? flash::num_pieces(schedule) : 0;
  own_counters += own;
  auto const stream = reinterpret_cast<cudaStream_t>(number<uintptr_t>(call, "stream"));
  flash::DeviceInfo const device = decoding_device(call);
  flash::largest_of_device = number<int>(call, "largest_cluster", 16);
  flash::RunSideBySide const so(side_by_side(call));
  variant.launch.decode(params, {device, stream, variant.name});
  workspace.check();
  check_counters();
  if (std::count(params.counters, params.counters + own, 0u) != own) {
    throw std::logic_error("counters of the workspace are not left at 0");
  }
}

// {instruction: (passes of eight lanes, conflicts)} since it was asked last
py::dict bank_counts() {
  py::dict counts;
  for (auto const& [kind, c] : simt::bank_counts) {
    counts[kind.c_str()] = py::make_tuple(c.passes, c.conflicts);
  }
  simt::bank_counts.clear();
  return counts;
}

}  // namespace

PYBIND11_MODULE(flash_kernels, m) {
  m.def("run", &run, py::arg("name"), py::arg("call"));
  m.def("select", &select_forward, py::arg("dtype"), py::arg("head_dim"), py::arg("head_dim_v"),
        py::arg("full_scores"), py::arg("sm"), py::arg("smem_per_block"), py::arg("page_size") = 0,
        py::arg("max_logits") = false);
  m.def(
      "pages_are_boxes",
      [](py::dict const& call) {
        return flash::page_layout(forward_params(call)) == flash::PageLayout::Boxes;
      },
      py::arg("call"));
  m.def("plan_backward", &plan_backward, py::arg("name"), py::arg("call"),
        py::arg("sm_count") = 132, py::arg("l2_mib") = 60);
  m.def("plan_forward", &plan_forward, py::arg("name"), py::arg("call"), py::arg("sm_count") = 132);
  m.def("merges_at_once", &merges_at_once, py::arg("call"));
  m.def("decodes", &decodes, py::arg("call"), py::arg("num_splits"), py::arg("sm"),
        py::arg("sm_count"));
  m.def("few_queries", &few_queries, py::arg("call"), py::arg("num_splits"), py::arg("sm"),
        py::arg("sm_count"));
  m.def("probabilities", &probabilities, py::arg("dtype"), py::arg("call"));
  m.def("run_append", &run_append, py::arg("name"), py::arg("call"));
  m.def("run_decode", &run_decode, py::arg("name"), py::arg("call"));
  m.def("bank_counts", &bank_counts);
  m.def("own_counters", [] { return std::exchange(own_counters, 0); });
  m.def("begin_log", [] { flash::launch_log.begin(); });
  m.def("end_log", [] { return flash::launch_log.end(); });
}
