// The Python module: small kernels by name, tensors by address.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cases.h"

namespace py = pybind11;

namespace selftest {

Fault fault_of(std::string const& name) {
  static std::map<std::string, Fault> const faults = {
      {"none", Fault::kNone},
      {"no load wait", Fault::kNoLoadWait},
      {"too many bytes", Fault::kTooManyBytes},
      {"no wgmma fence", Fault::kNoWgmmaFence},
      {"late wgmma wait", Fault::kLateWgmmaWait},
      {"no async fence", Fault::kNoAsyncFence},
      {"no store wait", Fault::kNoStoreWait},
      {"early overwrite", Fault::kEarlyOverwrite},
      {"wrong swizzle", Fault::kWrongSwizzle},
      {"early release", Fault::kEarlyRelease},
      {"no empty wait", Fault::kNoEmptyWait},
      {"no release", Fault::kNoRelease},
      {"touched operand", Fault::kTouchOperand},
  };
  return faults.at(name);
}

CUtensorMap make_map(void const* global, CUtensorMapDataType type,
                     std::vector<int64_t> const& sizes, std::vector<int> const& box, int span_bytes,
                     std::vector<int64_t> const& byte_strides) {
  std::vector<cuuint64_t> const global_sizes(sizes.begin(), sizes.end());
  std::vector<cuuint32_t> const boxes(box.begin(), box.end());
  std::vector<cuuint32_t> const ones(sizes.size(), 1);
  std::vector<cuuint64_t> strides(byte_strides.begin(), byte_strides.end());
  cuuint64_t dense = simt::bytes_of(type);
  for (size_t i = 0; byte_strides.empty() && i + 1 < sizes.size(); ++i) {
    strides.push_back(dense *= global_sizes[i]);
  }
  std::map<int, CUtensorMapSwizzle> const swizzles = {{0, CU_TENSOR_MAP_SWIZZLE_NONE},
                                                      {32, CU_TENSOR_MAP_SWIZZLE_32B},
                                                      {64, CU_TENSOR_MAP_SWIZZLE_64B},
                                                      {128, CU_TENSOR_MAP_SWIZZLE_128B}};
  // An array, so that it is not the caller's temporary object: g++ 12 does not align those.
  CUtensorMap map[1];
  CUresult const status = simt::encode_tiled(
      map, type, sizes.size(), const_cast<void*>(global), global_sizes.data(), strides.data(),
      boxes.data(), ones.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzles.at(span_bytes),
      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::invalid_argument("no tensor map");
  }
  return map[0];
}

}  // namespace selftest

namespace {

using namespace selftest;

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Matrices matrices(std::array<uintptr_t, 3> const& abc) {
  return {at<void>(abc[0]), at<void>(abc[1]), at<float>(abc[2])};
}

}  // namespace

PYBIND11_MODULE(flash_selftest, m) {
  m.def("products", [] {
    py::dict all;
    for (auto const& [name, c] : product_cases()) {
      all[name.c_str()] =
          py::dict(py::arg("n") = c.n, py::arg("k") = c.k, py::arg("a_along_k") = c.a_along_k,
                   py::arg("b_along_k") = c.b_along_k, py::arg("dtype") = c.dtype);
    }
    return all;
  });
  m.def("product",
        [](std::string const& name, std::array<uintptr_t, 3> abc, std::string const& fault) {
          product_cases().at(name).run(matrices(abc), fault_of(fault));
        });
  m.def("pipeline", [](std::array<uintptr_t, 3> abc, int k, std::string const& fault) {
    run_pipeline(matrices(abc), k, fault_of(fault));
  });
  m.def("box", [](std::string const& what, std::vector<int64_t> tensor, std::vector<int> box,
                  std::vector<int> begin, uintptr_t global, uintptr_t dense, int span_bytes) {
    run_boxes(what, tensor, box, begin, at<void>(global), at<void>(dense), span_bytes);
  });
  m.def("tensor_map", [](uintptr_t global, std::vector<int64_t> sizes, std::vector<int> box,
                         int span_bytes, std::vector<int64_t> byte_strides) {
    make_map(at<void>(global), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, sizes, box, span_bytes,
             byte_strides);
  });
  m.def("bulk", [](uintptr_t from, uintptr_t to, int bytes) {
    run_bulk(at<void>(from), at<void>(to), bytes);
  });
  m.def("stmatrix", [](uintptr_t input, uintptr_t output, bool transposed) {
    run_stmatrix(at<void>(input), at<void>(output), transposed);
  });
  m.def("threads", &run_threads);
  m.def("clusters", [](std::string const& what, int blocks, uintptr_t x, uintptr_t out) {
    run_clusters(what, blocks, at<void>(x), at<float>(out));
  });
  m.def("side_by_side", [](std::string const& what, int blocks, int at_a_time, uint64_t seed) {
    std::vector<int> out(blocks);
    run_side_by_side(what, blocks, {at_a_time, seed}, out.data());
    return out;
  });
}
