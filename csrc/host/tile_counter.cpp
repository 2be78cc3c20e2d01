#include "host/tile_counter.h"

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "host/error.h"

namespace flash {
namespace {

// Launches in one stream run one after the other and share a number. So do those that one capture
// records from one stream; but their graph may be replayed beside anything but itself, so nobody
// else gets their number as long as it is there. A stream has an id that is unique for ever, but
// must not be asked for it during a capture; there its handle will do, because the capture's id is
// unique.
using Key = std::pair<unsigned long long, unsigned long long>;  // capture + 1 or 0, stream

class Numbers {
 public:
  struct Taken {
    int number;
    bool is_new;
  };

  Taken of(Key const& key) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const [found, is_new] = of_.try_emplace(key, 0);
    if (is_new) {
      found->second = free_.empty() ? static_cast<int>(of_.size()) - 1 : *free_.begin();
      free_.erase(found->second);
    }
    return {found->second, is_new};
  }

  void give_back(Key const& key) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const node = of_.extract(key);
    free_.insert(node.mapped());
  }

 private:
  std::mutex mutex_;
  std::map<Key, int> of_;
  std::set<int> free_;  // below those that were never taken, of which the next is of_'s size
};

// Never destroyed: graphs may be gone later than anything here.
Numbers& numbers() {
  static auto* const all = new Numbers;
  return *all;
}

// By CUDA, when the last copy of a graph is gone and runs no more.
void CUDART_CB graph_is_gone(void* key) {
  std::unique_ptr<Key> const own(static_cast<Key*>(key));
  numbers().give_back(*own);
}

void give_back_with(cudaGraph_t graph, Key const& key) {
  cudaUserObject_t object{};
  FLASH_CHECK_CUDA(cudaUserObjectCreate(&object, new Key(key), &graph_is_gone, 1,
                                        cudaUserObjectNoDestructorSync),
                   "tile counter");
  FLASH_CHECK_CUDA(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove),
                   "tile counter");
}

}  // namespace

int tile_counter(cudaStream_t stream, int count) {
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0;
  cudaGraph_t graph{};
  FLASH_CHECK_CUDA(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph), "tile counter");
  bool const captures = status != cudaStreamCaptureStatusNone;
  Key key{capture + 1, reinterpret_cast<uintptr_t>(stream)};
  if (!captures) {
    key.first = 0;
    FLASH_CHECK_CUDA(cudaStreamGetId(stream, &key.second), "tile counter");
  }
  auto const [number, is_new] = numbers().of(key);
  if (captures && is_new) {
    give_back_with(graph, key);
  }
  return number < count ? number : -1;
}

}  // namespace flash
