#include "host/tile_counter.h"

#include <map>
#include <mutex>
#include <utility>

#include "host/error.h"

namespace flash {
namespace {

// Launches in one stream run one after the other and share a number. So do those that one capture
// records from one stream; but their graph may be replayed beside anything but itself, so nobody
// else ever gets their number. A stream has an id that is unique for ever, but must not be asked
// for it during a capture; there its handle will do, because the capture's id is unique.
using Key = std::pair<unsigned long long, unsigned long long>;  // capture + 1 or 0, stream

struct Numbers {
  std::mutex mutex;
  std::map<Key, int> of;
};

}  // namespace

int tile_counter(cudaStream_t stream, int count) {
  static Numbers numbers;
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0;
  FLASH_CHECK_CUDA(cudaStreamGetCaptureInfo(stream, &status, &capture), "tile counter");
  Key key{capture + 1, reinterpret_cast<uintptr_t>(stream)};
  if (status == cudaStreamCaptureStatusNone) {
    key.first = 0;
    FLASH_CHECK_CUDA(cudaStreamGetId(stream, &key.second), "tile counter");
  }
  std::lock_guard<std::mutex> const lock(numbers.mutex);
  int const next = static_cast<int>(numbers.of.size());
  int const number = numbers.of.try_emplace(key, next).first->second;
  return number < count ? number : -1;
}

}  // namespace flash
