// The Python module flash_attn._C. Importing it registers the ops; its functions describe the
// compiled kernels, or are the ops themselves (direct.h). It uses the limited API, so one binary
// serves every Python from 3.10 on.
#include <Python.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>

#include "api/direct.h"
#include "core/score_mod.h"
#include "launch/backward_plan.h"
#include "launch/decode_plan.h"
#include "launch/decode_schedule.h"
#include "launch/device.h"
#include "launch/measuring.h"
#include "launch/plan_text.h"
#include "launch/select.h"
#include "launch/sm_margin.h"
#include "launch/trace.h"

namespace flash::api {
namespace {

std::string row_json(Variant const& v) {
  auto const text = [](char const* key, char const* value) {
    return concat('"', key, "\": \"", value, '"');
  };
  return concat("{", text("name", v.name), ", ", text("direction", to_string(v.direction)),
                ", \"arch\": ", v.arch, ", ", text("dtype", v.dtype),
                ", \"head_dim\": ", v.head_dim, ", \"head_dim_v\": ", v.head_dim_v,
                ", \"block_m\": ", v.block_m, ", \"block_n\": ", v.block_n,
                ", \"warps\": ", v.warps, ", \"stages\": ", v.stages, ", ",
                text("scores", v.scores), ", \"cached_bits\": ", v.cached_bits, ", ",
                text("why", v.why), ", \"smem_bytes\": ", v.smem_bytes, "}");
}

template <class T>
constexpr char kFormat = '\0';
template <>
constexpr char kFormat<int> = 'i';
template <>
constexpr char kFormat<long long> = 'L';
template <>
constexpr char kFormat<double> = 'd';
template <>
constexpr char kFormat<char const*> = 's';

// Reads a call's arguments into `values`, each as the type it is written to; false with a Python
// error set.
template <class... T>
bool parse(PyObject* args, T*... values) {
  static_assert(((kFormat<T> != '\0') && ...));
  constexpr char format[] = {kFormat<T>..., '\0'};
  return PyArg_ParseTuple(args, format, values...);
}

PyObject* string(std::string const& s) {
  return PyUnicode_FromStringAndSize(s.data(), static_cast<Py_ssize_t>(s.size()));
}

PyObject* compiled_variants(PyObject*, PyObject*) {
  std::string json;
  for (Variant const& v : variants()) {
    json += (json.empty() ? "" : ", ") + row_json(v);
  }
  return string("[" + json + "]");
}

// Shared memory that a CTA can have on every GPU of the family.
int smem_per_block(int sm) {
  return sm / 10 >= 9 && sm / 10 <= 11 ? 232448 : sm == 80 || sm == 87 ? 166912 : 101376;
}

// block_n: keys of the kernel's tile; 0: the row's.
struct Served {
  int splits = 1;
  int few_queries = 0;
  int block_n = 0;
  std::string plan = "null";
};

PyObject* selection_json(Selection const& selection, Served const& served) {
  std::string rejected;
  for (Rejection const& r : selection.rejected) {
    rejected += concat(rejected.empty() ? "" : ", ", "{\"name\": \"", r.variant->name,
                       "\", \"why\": \"", r.why, "\"}");
  }
  Variant const* const variant = selection.variant;
  int const block_n = served.block_n > 0 || !variant ? served.block_n : variant->block_n;
  return string(concat("{\"variant\": ", variant ? row_json(*variant) : "null",
                       ", \"splits\": ", served.splits, ", \"few_queries\": ", served.few_queries,
                       ", \"block_n\": ", block_n, ", \"plan\": ", served.plan, ", \"rejected\": [",
                       rejected, "]}"));
}

int const something = 0;  // only whether a tensor is there matters

// total_q, total_k: below 0 in a dense call.
void set_lengths(Seqlens& s, long long total_q, long long total_k) {
  s.cu_q = total_q >= 0 ? &something : nullptr;
  s.total_q = std::max(total_q, 0LL);
  s.cu_k = total_k >= 0 ? &something : nullptr;
  s.total_k = std::max(total_k, 0LL);
}

PyObject* explain_backward(PyObject*, PyObject* args) {
  BwdParams p{};
  DeviceInfo device{};
  int full_scores = 0, deterministic = 0;
  long long total_q = 0, total_k = 0, l2_bytes = 0, memory_rate = 0;
  double softcap = 0;
  char const* dtype = nullptr;
  if (!parse(args, &device.sm, &dtype, &p.head_dim, &p.head_dim_v, &full_scores, &softcap,
             &device.sm_count, &l2_bytes, &memory_rate, &p.seqlens.batch, &p.seqlens.seqlen_q,
             &p.seqlens.seqlen_k, &total_q, &total_k, &p.heads_q, &p.heads_kv, &p.mask.left,
             &p.mask.right, &deterministic)) {
    return nullptr;
  }
  device.l2_bytes = l2_bytes;
  device.memory_rate = static_cast<float>(memory_rate);
  device.smem_per_block = smem_per_block(device.sm);
  set_lengths(p.seqlens, total_q, total_k);
  int wanted = 0;
  p.dq.ptr = &wanted;
  Selection const selection =
      explain({Direction::Bwd, dtype, p.head_dim, p.head_dim_v, full_scores != 0, device.sm,
               device.smem_per_block, PageLayout::Any, softcap_in_range(softcap)});
  if (!selection.variant) {
    return selection_json(selection, {});
  }
  return selection_json(
      selection, {.plan = backward_json(problem_of(p, deterministic != 0), machine_of(device),
                                        kernel_of_backward(*selection.variant, device))});
}

// A forward call in numbers, also one against a cache: the arguments of explain_forward and
// explain_decode.
struct Described {
  FwdParams params{};
  DeviceInfo device{};
  char const* dtype = nullptr;
  int full_scores = 0, num_splits = 0, cached = 0, odd_rows = 0;
  // `contents`: what keys are; 0: numbers of q's dtype. kProducts: q is codes as well.
  enum { kCodes = 1, kCodesOfRows, kLatent, kProducts };

  // False with a Python error set.
  bool read(PyObject* args) {
    FwdParams& p = params;
    Seqlens& s = p.seqlens;
    int page_size = 0, batch_invariant = 0, used_k = 0, max_logits = 0, contents = 0;
    long long total_q = 0, total_k = 0, l2_bytes = 0, memory_rate = 0;
    if (!parse(args, &device.sm, &dtype, &p.head_dim, &p.head_dim_v, &full_scores, &device.sm_count,
               &l2_bytes, &memory_rate, &s.batch, &s.seqlen_q, &s.seqlen_k, &total_q, &total_k,
               &p.heads_q, &p.heads_kv, &p.mask.left, &p.mask.right, &num_splits, &page_size,
               &cached, &batch_invariant, &odd_rows, &used_k, &max_logits, &s.few_q, &contents)) {
      return false;
    }
    device.l2_bytes = l2_bytes;
    device.memory_rate = static_cast<float>(memory_rate);
    device.smem_per_block = smem_per_block(device.sm);
    p.q.head_stride = 1;  // not 0: heads do not share memory
    set_lengths(s, total_q, total_k);
    s.used_k = used_k ? &something : nullptr;
    s.in_pages = page_size > 0;
    p.pages.table = page_size ? &something : nullptr;
    p.pages.page_size = FastDiv(std::max(page_size, 1));
    p.batch_invariant = batch_invariant;
    p.max_logits.to_row = max_logits;
    p.scores.softmax_scale = 1.f;
    p.scores.softcap = full_scores ? 1.f : 0.f;
    p.codes.used = contents == kCodes || contents == kCodesOfRows || contents == kProducts;
    p.codes.of_q = contents == kProducts;
    p.codes.k.of_rows = contents == kCodesOfRows;
    p.q_latent.ptr = contents == kLatent ? &something : nullptr;
    p.odd = odd_rows ? OddRows{p.head_dim, p.head_dim_v} : OddRows{};
    return true;
  }

  Request request(Direction direction, bool full) const {
    return {direction,
            dtype,
            params.head_dim,
            params.head_dim_v,
            full,
            device.sm,
            device.smem_per_block,
            params.pages.table ? page_layout(params.pages.page_size.divisor) : PageLayout::Boxes,
            /*softcap=*/0.f,
            /*max_logits=*/params.max_logits.wanted(),
            bits_of_keys(params)};
  }

  bool has_rows() const {
    return params.seqlens.batch > 0 && params.seqlens.seqlen_q > 0 && params.heads_q > 0;
  }
};

PyObject* explain_forward(PyObject*, PyObject* args) {
  Described call;
  if (!call.read(args)) {
    return nullptr;
  }
  FwdParams& p = call.params;
  p.odd = {};  // the forward kernel reads a copy
  Direction const direction = p.pages.table ? Direction::Paged : Direction::Fwd;
  Selection const selection = explain(call.request(direction, call.full_scores != 0));
  if (!selection.variant) {
    return selection_json(selection, {});
  }
  plan::Problem const problem = problem_of(p, call.num_splits, call.cached != 0);
  plan::Machine const machine = machine_of(call.device);
  plan::Kernel const kernel = kernel_of_forward(*selection.variant, call.device);
  plan::ForwardChoice const choice = plan::plan_forward(problem, machine, kernel).choice;
  return selection_json(selection, {.splits = choice.splits,
                                    .block_n = kernel.block_n_of(choice.tile),
                                    .plan = forward_json(problem, machine, kernel)});
}

// Queries as they are, and as codes.
PyObject* chunk_us(PyObject*, PyObject* args) {
  Described call;
  if (!call.read(args)) {
    return nullptr;
  }
  plan::Machine const machine = machine_of(call.device);
  auto const predicted = [&](char const* dtype, bool of_q) {
    call.dtype = dtype;
    call.params.codes.of_q = of_q;
    Variant const* const row = find(call.request(Direction::Paged, call.full_scores != 0));
    if (!row) {
      return std::numeric_limits<double>::infinity();
    }
    plan::Problem const problem = problem_of(call.params, call.num_splits, /*cached=*/false);
    plan::Kernel const kernel = kernel_of_forward(*row, call.device);
    return plan::plan_forward(problem, machine, kernel).us +
           (of_q ? plan::query_codes_us(problem, machine) : 0);
  };
  double const as_they_are = predicted(call.dtype, false);
  return Py_BuildValue("dd", as_they_are, predicted("e4m3", true));
}

PyObject* explain_decode(PyObject*, PyObject* args) {
  Described call;
  if (!call.read(args)) {
    return nullptr;
  }
  FwdParams& p = call.params;
  bool const is_varlen = p.seqlens.cu_q, cached = call.cached && !is_varlen;
  int const num_splits = is_varlen || cached ? call.num_splits : 0;
  int const few_q = decode_plan_of(p, call.device, num_splits, cached).few_q;
  if (few_q == 0 && !p.q_latent.ptr) {
    Py_RETURN_NONE;
  }
  if (is_varlen) {
    p.seqlens.few_q = p.q_latent.ptr ? kAllQueries : few_q;
  }
  // Where the forward kernel runs beside it, both read its copy of odd rows.
  bool const copied = p.seqlens.cu_q && p.seqlens.few_q != kAllQueries;
  bool const full = call.full_scores || (call.odd_rows && !copied);
  Selection const selection = explain(call.request(decode_direction(p), full));
  Served served{.few_queries = p.seqlens.few_q == kAllQueries ? 0 : p.seqlens.few_q};
  if (selection.variant && call.has_rows()) {
    plan::DecodePlan const plan = decode_plan_of(p, call.device, call.num_splits, call.cached);
    PieceSchedule const schedule = decode_schedule(*selection.variant, p, plan.cut);
    served.splits = schedule.max_pieces << schedule.cluster_log2;
    served.plan = decode_json(
        plan::decode_choices(decode_problem_of(p, call.device, call.num_splits, call.cached),
                             machine_of(call.device),
                             kernel_of_decode(*selection.variant, p, call.device)),
        plan);
  }
  return selection_json(selection, served);
}

PyObject* force_choice(PyObject*, PyObject* args) {
  int choice = kPlanned, decode = kPlanned;
  if (!parse(args, &choice, &decode)) {
    return nullptr;
  }
  forced_choice = choice;
  forced_decode = decode;
  Py_RETURN_NONE;
}

PyObject* record_plans(PyObject*, PyObject* args) {
  int on = 0;
  if (!parse(args, &on)) {
    return nullptr;
  }
  records_plans = on != 0;
  auto const or_null = [](std::string const& json) { return json.empty() ? "null" : json; };
  return string(concat("{\"plan\": ", or_null(recorded_plan.take()),
                       ", \"decode\": ", or_null(recorded_decode.take()), "}"));
}

PyObject* sms_left(PyObject*, PyObject* args) {
  int sms = 0;
  long long margin = 0;
  return parse(args, &sms, &margin) ? PyLong_FromLong(::flash::sms_left(sms, margin)) : nullptr;
}

PyObject* cuda_version(PyObject*, PyObject*) { return PyLong_FromLong(CUDART_VERSION); }

PyObject* device_code(PyObject*, PyObject* args) {
  int sm = 0;
  return parse(args, &sm) ? string(to_string(::flash::device_code(sm))) : nullptr;
}

PyObject* trace_listener_ = nullptr;  // kept for ever, and called by any thread

void tell_python(std::string const& line) {
  PyGILState_STATE const state = PyGILState_Ensure();
  PyObject* const text = string(line);
  PyObject* const result =
      text ? PyObject_CallFunctionObjArgs(trace_listener_, text, nullptr) : nullptr;
  if (!result) {
    PyErr_WriteUnraisable(trace_listener_);  // a launch must not fail because of its line
  }
  Py_XDECREF(result);
  Py_XDECREF(text);
  PyGILState_Release(state);
}

PyObject* trace_to(PyObject*, PyObject* listener) {
  if (listener == Py_None) {
    ::flash::trace_to(nullptr);  // a launch that has begun to tell still calls its listener
  } else {
    trace_listener_ = Py_NewRef(listener);
    ::flash::trace_to(tell_python);
  }
  return Py_NewRef(Py_None);
}

PyMethodDef methods[] = {
    {"trace_to", trace_to, METH_O,
     "(listener): calls it with a line of text for each launch from now on; None stops that."},
    {"compiled_variants", compiled_variants, METH_NOARGS, "JSON list of the compiled variants."},
    {"explain_forward", explain_forward, METH_VARARGS,
     "(sm, dtype, head_dim, head_dim_v, full_scores, sm_count, l2_bytes, memory_rate, batch, "
     "seqlen_q, seqlen_k, total_q, total_k, heads, heads_kv, left, right, num_splits, page_size, "
     "cached, batch_invariant, odd_rows, used_k, max_logits, few_queries, contents) -> JSON: "
     "the variant, why the others do not serve the call, block_n (keys of the tile), splits (KV "
     "splits), and the "
     "plan: its choices, the predicted time of each, and the chosen one. memory_rate: bytes that "
     "memory moves in a µs, 0 if unknown. total_q, total_k: rows of varlen tensors, otherwise -1. "
     "page_size: rows of a page, 1 if left padding or strides rule out boxes of more "
     "rows, 0 without pages. odd_rows: a cache's rows are not multiples of 16 bytes. used_k: "
     "whether a tensor says how many keys are in use. max_logits: whether they are wanted. "
     "few_queries: explain_decode's, or 0. contents: of a cache: 1 for codes of 8 bits, 2 "
     "if their descales are of rows, 3 for latent rows."},
    {"explain_backward", explain_backward, METH_VARARGS,
     "(sm, dtype, head_dim, head_dim_v, full_scores, softcap, sm_count, l2_bytes, memory_rate, "
     "batch, seqlen_q, seqlen_k, total_q, total_k, heads, heads_kv, left, right, deterministic) -> "
     "JSON like explain_forward's, with the plan: its choices, the predicted time of each, and the "
     "chosen "
     "one. total_q, total_k: rows of varlen tensors, otherwise -1."},
    {"explain_decode", explain_decode, METH_VARARGS,
     "Takes explain_forward's arguments, with few_queries 0 -> JSON of the decode kernel, with the "
     "most splits of a sequence, or the CTAs that are wanted in a cluster; None if the forward "
     "kernel serves the call. few_queries in the result: if not 0, the decode kernel serves "
     "sequences of no more queries, and the forward kernel the others."},
    {"chunk_us", chunk_us, METH_VARARGS,
     "Takes explain_forward's arguments, of queries of 16 bits against pages of codes -> predicted "
     "microseconds of the forward kernel with the queries as they are, and with codes of them, "
     "which "
     "a pass makes first; infinite where no kernel serves it."},
    {"force_choice", force_choice, METH_VARARGS,
     "(index, decode): for measurements, forces one of each call's choices. index: of a forward's "
     "or a backward's; decode: of the decode kernel's, or -2 for the forward kernel in its place. "
     "-1: the planned choice."},
    {"record_plans", record_plans, METH_VARARGS,
     "(on): turns recording on or off -> JSON of the last plans since the last such call: plan, of "
     "a "
     "forward or a backward, and decode, of the decode kernel; null: there was none."},
    {"device_code", device_code, METH_VARARGS,
     "(sm) -> what a GPU of this compute capability runs: \"machine code\", what the driver "
     "compiles from \"PTX\", or \"none\" of it."},
    {"sms_left", sms_left, METH_VARARGS,
     "(sms, sm_margin) -> how many of a GPU's SMs a call takes that leaves so many to others."},
    {"cuda_version", cuda_version, METH_NOARGS, "CUDA version of the build, e.g. 13000."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_C",
                      "Compiled kernels of flash_attn.",
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace
}  // namespace flash::api

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  PyObject* const module = PyModule_Create(&flash::api::module);
  if (module && !flash::api::add_direct_functions(module)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
