#include "host/tile_counter.h"

#include <mutex>
#include <unordered_map>

#include "host/error.h"

namespace flash {
namespace {

// Launches in one stream run one after the other and share a counter. A captured launch gets one
// for ever: its graph may be replayed beside anything but itself.
struct Counters {
  std::mutex mutex;
  std::unordered_map<unsigned long long, int> of_stream;  // by the stream's id, unique for ever
  int taken = 0;

  int take(int count) { return taken < count ? taken++ : -1; }
};

}  // namespace

int tile_counter(cudaStream_t stream, int count) {
  static Counters counters;
  cudaStreamCaptureStatus capture{};
  unsigned long long id = 0;
  FLASH_CHECK_CUDA(cudaStreamIsCapturing(stream, &capture), "tile counter");
  std::lock_guard<std::mutex> const lock(counters.mutex);
  if (capture != cudaStreamCaptureStatusNone) {
    return counters.take(count);
  }
  FLASH_CHECK_CUDA(cudaStreamGetId(stream, &id), "tile counter");
  auto const [entry, is_new] = counters.of_stream.try_emplace(id, -1);
  if (is_new) {
    entry->second = counters.take(count);
  }
  return entry->second;
}

}  // namespace flash
