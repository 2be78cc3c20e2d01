#include "launch/counters.h"

#include "launch/error.h"

namespace flash {
namespace {

constexpr char kName[] = "counters";

// While one exists, this thread may allocate memory and wait for it although a thread captures a
// graph: no such operation becomes a part of the graph.
class OutsideOfCaptures {
 public:
  OutsideOfCaptures() { FLASH_CHECK_CUDA(cudaThreadExchangeStreamCaptureMode(&mode_), kName); }
  ~OutsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideOfCaptures(OutsideOfCaptures const&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the one before
};

// A stream that does not synchronise with the default stream.
class OwnStream {
 public:
  OwnStream() {
    FLASH_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), kName);
  }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(OwnStream const&) = delete;

  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_{};
};

// The code's own memory: zero since it was loaded.
CounterSlab slab_of_code(void const* symbol) {
  OutsideOfCaptures const outside;
  void* memory = nullptr;
  size_t bytes = 0;
  FLASH_CHECK_CUDA(cudaGetSymbolAddress(&memory, symbol), kName);
  FLASH_CHECK_CUDA(cudaGetSymbolSize(&bytes, symbol), kName);
  return {static_cast<uint32_t*>(memory), static_cast<int64_t>(bytes / sizeof(uint32_t))};
}

CounterSlab allocated_slab(int64_t count) {
  OutsideOfCaptures const outside;
  OwnStream const stream;
  size_t const bytes = count * sizeof(uint32_t);
  void* memory = nullptr;
  cudaError_t const status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // otherwise the runtime returns it to the next caller
    throw std::runtime_error(concat(kOutOfMemory, " flash_attn asked for ", bytes,
                                    " bytes of counters beside torch's allocator"));
  }
  FLASH_CHECK_CUDA(status, kName);
  FLASH_CHECK_CUDA(cudaMemsetAsync(memory, 0, bytes, stream), kName);
  FLASH_CHECK_CUDA(cudaStreamSynchronize(stream), kName);
  return {static_cast<uint32_t*>(memory), count};
}

// A stream has an id that is unique for ever, unlike its handle, but must not be asked for it
// during a capture; there its handle will do, because the capture's id is unique.
CounterOwner owner_of(Counting what, LaunchContext const& launch) {
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0;
  FLASH_CHECK_CUDA(cudaStreamGetCaptureInfo(launch.stream, &status, &capture), kName);
  CounterOwner owner{launch.device.index, 0, 0, what};
  if (status == cudaStreamCaptureStatusNone) {
    FLASH_CHECK_CUDA(cudaStreamGetId(launch.stream, &owner.stream), kName);
  } else {
    owner.capture = capture + 1;
    owner.stream = reinterpret_cast<uintptr_t>(launch.stream);
  }
  return owner;
}

}  // namespace

Counters::Counters(void const* symbol)
    : arena_(*new CounterArena([symbol] { return slab_of_code(symbol); }, allocated_slab)) {}

uint32_t* Counters::of(Counting what, int64_t count, LaunchContext const& launch) {
  return arena_.range(owner_of(what, launch), count);
}

}  // namespace flash
