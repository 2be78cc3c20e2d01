// Small kernels for the emulated instructions, which Python runs by name.
#pragma once

#include "sm90/tensor_core.h"  // before other headers of CuTe

#include <cutlass/arch/barrier.h>

#include <map>
#include <string>

#include "launch/launch_kernel.h"

namespace selftest {

using namespace cute;

// A mistake that a kernel makes on purpose.
enum class Fault {
  kNone,
  kNoLoadWait,
  kTooManyBytes,  // announced to the mbarrier
  kNoWgmmaFence,
  kLateWgmmaWait,  // accumulators are read before it
  kNoAsyncFence,
  kNoStoreWait,
  kEarlyOverwrite,  // of what a bulk store reads
  kWrongSwizzle,
  kEarlyRelease,  // of a buffer that wgmma still reads
  kNoEmptyWait,
  kNoRelease,
  kTouchOperand,  // registers of A in flight
};

Fault fault_of(std::string const& name);

// Addresses of a [64, k] (or [k, 64]), b [n, k] (or [k, n]) and c [64, n].
struct Matrices {
  void const* a;
  void const* b;
  float* c;
};

struct ProductCase {
  int n, k, span_bytes;
  bool a_in_registers, a_along_k, b_along_k;
  std::string dtype;
  void (*run)(Matrices const&, Fault);
};

// All that products.cpp instantiates, under their names.
std::map<std::string, ProductCase> const& product_cases();

void run_pipeline(Matrices const& matrices, int k, Fault fault);
void run_stmatrix(void const* input, void* output, bool transposed);
void run_boxes(std::string const& what, std::vector<int64_t> const& tensor,
               std::vector<int> const& box, std::vector<int> const& begin, void* global,
               void* dense, int span_bytes);
void run_bulk(void const* from, void* to, int bytes);
void run_threads(std::string const& what);
// x [16, 32], out [blocks, 16, 32]
void run_clusters(std::string const& what, int blocks, void const* x, float* out);
// out [blocks]
void run_side_by_side(std::string const& what, int blocks, flash::SideBySide how, int* out);

template <auto kKernel, class... Args>
void launch(flash::LaunchShape const& shape, Args const&... args) {
  static flash::DeviceInfo const device{0, 90, 0, 232448, 1};
  flash::launch_kernel<kKernel>({device, nullptr, "selftest"}, shape, args...);
}

// Starts `kKernel` with this many blocks.
template <auto kKernel, class... Args>
void launch(int blocks, int threads, int smem_bytes, Args const&... args) {
  launch<kKernel>({blocks, threads, smem_bytes}, args...);
}

// A tensor map over `global` with `sizes`, strides of a dense tensor unless given.
CUtensorMap make_map(void const* global, CUtensorMapDataType type,
                     std::vector<int64_t> const& sizes, std::vector<int> const& box, int span_bytes,
                     std::vector<int64_t> const& byte_strides = {});

}  // namespace selftest
