#include "host/tile_counter.h"

#include <map>
#include <mutex>
#include <utility>

#include "host/error.h"

namespace flash {
namespace {

// Launches in one stream run one after the other and share a number. So do those that one capture
// records from one stream; but their graph may be replayed beside anything but itself, so nobody
// else ever gets their number.
using Key = std::pair<unsigned long long, unsigned long long>;  // ids, unique for ever

struct Numbers {
  std::mutex mutex;
  std::map<Key, int> of;
};

}  // namespace

int tile_counter(cudaStream_t stream, int count) {
  static Numbers numbers;
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0, id = 0;
  FLASH_CHECK_CUDA(cudaStreamGetCaptureInfo(stream, &status, &capture), "tile counter");
  FLASH_CHECK_CUDA(cudaStreamGetId(stream, &id), "tile counter");
  capture = status == cudaStreamCaptureStatusNone ? 0 : capture + 1;
  std::lock_guard<std::mutex> const lock(numbers.mutex);
  int const next = static_cast<int>(numbers.of.size());
  int const number = numbers.of.try_emplace({capture, id}, next).first->second;
  return number < count ? number : -1;
}

}  // namespace flash
