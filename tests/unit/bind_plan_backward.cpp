#include "bindings.h"
#include "plan/machines/h100.h"
#include "plan/machines/h200.h"
#include "plan/plan.h"

namespace {

using namespace flash::plan;

// What a test says of a call, a GPU and a row of the table.
struct Asked {
  Problem problem{};
  Machine machine{};
  Kernel kernel{};

  template <class T>
  static void take(py::dict const& d, char const* name, T& to) {
    if (d.contains(name)) {
      to = d[name].cast<T>();
    }
  }

  Asked(py::dict const& d, std::string const& gpu) : machine(gpu == "H100" ? kH100 : kH200) {
    Problem& p = problem;
    p.batch = p.heads_q = p.heads_kv = 1;
    p.mask = {-1, -1};
    p.wants_dq = true;
    take(d, "batch", p.batch);
    take(d, "seqlen_q", p.seqlen_q);
    take(d, "seqlen_k", p.seqlen_k);
    take(d, "packed", p.varlen_q);
    p.varlen_k = p.varlen_q;
    p.total_q = int64_t(p.batch) * p.seqlen_q;
    p.total_k = int64_t(p.batch) * p.seqlen_k;
    take(d, "total_q", p.total_q);
    take(d, "total_k", p.total_k);
    take(d, "heads_q", p.heads_q);
    take(d, "heads_kv", p.heads_kv);
    take(d, "left", p.mask.left);
    take(d, "right", p.mask.right);
    take(d, "deterministic", p.deterministic);
    take(d, "wants_dq", p.wants_dq);
    Kernel& k = kernel;
    take(d, "block_m", k.block_m);
    take(d, "block_n", k.block_n);
    take(d, "head_dim", k.head_dim);
    take(d, "head_dim_v", k.head_dim_v);
    take(d, "resident", k.resident);
    take(d, "sm", k.sm);
    take(d, "plain", k.plain);
    take(d, "cluster", k.cluster);
    p.head_dim = k.head_dim;
    p.head_dim_v = k.head_dim_v;
    take(d, "sm_count", machine.sm_count);
    take(d, "l2_bytes", machine.l2_bytes);
    take(d, "memory", machine.memory);
  }
};

py::tuple tuple_of(BackwardChoice const& c) {
  constexpr char const* schedules[] = {"tiles", "kv_persistent", "ordered_dq"};
  return py::make_tuple(schedules[static_cast<int>(c.schedule)], c.heads, c.row_splits,
                        c.side_by_side);
}

}  // namespace

void bind_plan_backward(py::module_& m) {
  // A choice: (schedule, heads of a tile, row splits, heads side by side).
  m.def("plan_backward", [](py::dict const& call, std::string const& gpu) {
    Asked const asked(call, gpu);
    BackwardPlan const plan = plan_backward(asked.problem, asked.machine, asked.kernel);
    return py::make_tuple(tuple_of(plan.choice), plan.us);
  });
  // [(choice, predicted µs), …]
  m.def("backward_choices", [](py::dict const& call, std::string const& gpu) {
    Asked const asked(call, gpu);
    py::list choices;
    for (auto const& [choice, us] : backward_choices(asked.problem, asked.machine, asked.kernel)) {
      choices.append(py::make_tuple(tuple_of(choice), us));
    }
    return choices;
  });
  m.def("heads_computed_before", [](py::dict const& call, int side_by_side) {
    Asked const asked(call, "H200");
    return heads_computed_before(asked.problem, asked.kernel, side_by_side);
  });
  m.def("computes_delta", [](py::dict const& call) {
    Asked const asked(call, "H200");
    return computes_delta(asked.problem, asked.kernel.head_dim);
  });
}
