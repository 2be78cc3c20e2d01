// Keys in pages: a tile of them is several boxes of TMA, each from one page. Two more warps of the
// producer's warpgroup load K and V, one each: a warp needs about as long to start a box of 16 keys
// as one of 128, and one warp would not keep up with the boxes of both.
#pragma once

#include "core/paging.h"
#include "sm90/forward/shared_storage.h"

namespace flash::sm90::forward {

// Fetches the 128 bytes around the address, which has to be mapped.
__device__ inline void prefetch_to_l2([[maybe_unused]] void const* address) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Prefetches the block table to L2 before it is known which of its entries are wanted. Called by
// threads that have nothing to do yet. Each thread of a launch fetches one line; the rest
// of a table with room for very long sequences is read when it is wanted.
__device__ inline void prefetch_table(Pages const& pages, int batch, int64_t thread) {
  constexpr int kLine = 128 / sizeof(int);
  int64_t const entries = (batch - 1) * pages.table_stride + pages.per_sequence;
  if (pages.table && thread * kLine < entries) {
    prefetch_to_l2(pages.table + thread * kLine);
  }
}

// What one lane knows of a tile of keys: where the eight keys from 8 * (lane / 2) on are. The lanes
// whose keys have a page are then the keys that exist, in the order of fragment_bits (core/mask.h).
struct KeyEight {
  static constexpr int kKeys = 8;  // pages and boxes are multiples of it

  int first;  // in the tile
  int keys;   // keys of the sequence, from `first` on, but at most a box's
  PageSlot slot;

  // The table's entry is on its way when this returns; its first use waits for it.
  template <class Config>
  __device__ KeyEight(ForwardArgs const& args, RowBlock<Config> const& block, int step)
      : first(WarpLanes{}.index() / 2 * kKeys), slot{PageSlot::kNoPage, 0} {
    static_assert(Config::kBlockN <= WarpLanes::kCount / 2 * kKeys);
    int const position = block.range.block_at(step) * Config::kBlockN + first;
    keys = min(block.keys_at.rows - position, args.box_keys);
    if (keys > 0) {
      slot = KeyPages(args.params.pages, block.tile.batch).slot(position);
    }
  }

  __device__ bool begins_box(ForwardArgs const& args, int tile_keys) const {
    return WarpLanes{}.index() % 2 == 0 && first < tile_keys && (first & (args.box_keys - 1)) == 0;
  }
};

// The same in a kernel for small pages, where each lane has one of a tile's boxes.
template <class Config>
struct SmallPageBox {
  int first;  // key of the tile
  int keys;   // keys of the sequence, from `first` on, but at most a box's
  PageSlot slot;

  __device__ SmallPageBox(ForwardArgs const& args, RowBlock<Config> const& block, int step)
      : first(WarpLanes{}.index() * args.box_keys), slot{PageSlot::kNoPage, 0} {
    static_assert(Config::kBlockN <= WarpLanes::kCount * KeyEight::kKeys);
    int const position = block.range.block_at(step) * Config::kBlockN + first;
    keys = in_tile() ? min(block.keys_at.rows - position, args.box_keys) : 0;
    if (keys > 0) {
      slot = KeyPages(args.params.pages, block.tile.batch).slot(position);
    }
  }

  __device__ bool in_tile() const { return first < Config::kBlockN; }
  __device__ static int size(ForwardArgs const& args) { return args.box_keys; }
  __device__ static TensorMap const& map(TensorMap const* maps) { return *maps; }
};

// The same in a kernel for large pages.
template <class Config>
struct LargePageBox {
  static_assert(Config::kBlockN <= PageBox::kMostKeys && Config::kBlockN % PageBox::kLeast == 0);

  int first;     // key of the tile
  int box_keys;  // 0: the lane has none
  int keys;      // keys of the sequence, from `first` on, but at most a box's
  PageSlot slot;

  __device__ LargePageBox(ForwardArgs const& args, RowBlock<Config> const& block, int step)
      : slot{PageSlot::kNoPage, 0} {
    int const position = block.range.block_at(step) * Config::kBlockN;
    PageBox const box(WarpLanes{}.index(), position, block.keys_at.rows - position, Config::kBlockN,
                      args.params.pages.page_size);
    first = box.first;
    box_keys = box.size;
    keys = box.keys;
    if (keys > 0) {
      slot = KeyPages(args.params.pages, block.tile.batch).slot(position + first);
    }
  }

  __device__ bool in_tile() const { return box_keys > 0; }
  __device__ int size(ForwardArgs const&) const { return box_keys; }
  __device__ static TensorMap const& map(TensorMap const* maps) {
    return maps[PageBox::size_index(WarpLanes{}.index())];
  }
};

template <class Config>
using KeyBox = std::conditional_t<Config::kLargePages, LargePageBox<Config>, SmallPageBox<Config>>;

// Whether a page of the keys that the row block sees is missing. All lanes of a warp call it.
template <class Config>
__device__ bool misses_pages(ForwardArgs const& args, RowBlock<Config> const& block) {
  KeyPages const pages(args.params.pages, block.tile.batch);
  int const begin = block.range.begin * Config::kBlockN;
  int const end = min(block.range.end * Config::kBlockN, block.keys_at.rows);
  int const entries_end = begin < end ? pages.page_size.quotient(end - 1) + 1 : 0;
  bool missing = false;
#pragma unroll 4
  for (int entry = pages.page_size.quotient(begin) + WarpLanes{}.index(); entry < entries_end;
       entry += WarpLanes::kCount) {
    missing |= !pages.exists({pages.page(entry), 0});
  }
  return __any_sync(WarpLanes::kAll, missing);
}

// Loads K or V of all row blocks, as they are announced. All lanes of a warp call it.
template <class Config, int kTile>
struct PageLoader {
  using Element = typename Config::Element;
  using Position = RingPosition<Config::kStages>;
  static constexpr int kColumns = kTile / Config::kBlockN;

  ForwardArgs const& args;
  SharedStorage<Config>& smem;
  TensorMap const& tensor;
  TensorMap const* eights;  // the same by boxes of eights, in a kernel for pages only
  Ring<Config::kStages>& ring;
  Element (&buffers)[Config::kStages][kTile];
  // Where to tell consumers which keys of a tile exist; null: nowhere
  uint32_t (*exist)[Config::kKeyWords];

  __device__ void run() {
    bool const elected = elect_one_sync();
    uint32_t blocks = 0;
    for (uint32_t number = 0;; ++number) {
      typename SharedStorage<Config>::Description const at(number);
      smem.described.wait_full(at);
      RowBlock<Config> const& block = smem.row_block(number);
      if (!block.tile.valid) {
        break;
      }
      int const steps = block.range.count();
      for (int step = 0; step < steps; ++step) {
        if constexpr (Config::kPagesOnly) {
          load_eights(block, step, Position(blocks + step), elected);
        } else {
          load(block, step, Position(blocks + step), elected);
        }
      }
      blocks += steps;
      smem.described.release(at);
    }
  }

 private:
  __device__ void load(RowBlock<Config> const& block, int step, Position at, bool elected) {
    KeyEight const eight(args, block, step);
    ring.wait_empty(at);
    bool const has_page = uint32_t(eight.slot.page) < uint32_t(args.params.pages.count);
    uint32_t const existing = __ballot_sync(WarpLanes::kAll, has_page);
    Barrier& full = ring.full(at.stage);
    if (elected) {
      if (exist) {
        exist[at.in_two_rounds()][0] = existing;
      }
      full.arrive_and_expect_tx(kTile * sizeof(Element));
    }
    __syncwarp();
    if (eight.begins_box(args, Config::kBlockN)) {
      TileCoord const box{eight.slot.row, has_page ? eight.keys : 0, block.keys_at.head,
                          has_page ? eight.slot.page : 0};
      load_tile<Config::kBlockN, kColumns>(tensor, box,
                                           buffers[at.stage] + eight.first * kRun<kColumns>, full,
                                           TMA::CacheHintSm90::EVICT_LAST);
    }
    __syncwarp();
  }

  __device__ void load_eights(RowBlock<Config> const& block, int step, Position at, bool elected) {
    KeyBox<Config> const box(args, block, step);
    ring.wait_empty(at);
    bool const has_page = uint32_t(box.slot.page) < uint32_t(args.params.pages.count);
    tell_existing(at, box, has_page, elected);
    Barrier& full = ring.full(at.stage);
    if (elected) {
      full.arrive_and_expect_tx(kTile * sizeof(Element));
    }
    __syncwarp();
    constexpr auto kHint = TMA::CacheHintSm90::EVICT_LAST;
    TileCoord at_keys{box.slot.row, has_page ? box.keys : 0, block.keys_at.head, box.slot.page};
    Element* const target = buffers[at.stage] + box.first * kColumns;
    TensorMap const& map = box.map(eights);
    bool const ends = at_keys.rows > 0 && at_keys.rows < box.size(args);
    if (box.in_tile() && !ends) {
      auto const c = map.eights(at_keys);
      SM90_TMA_LOAD_5D::copy(&map.map, reinterpret_cast<uint64_t*>(&full),
                             static_cast<uint64_t>(kHint), target, 0, c.c1, c.c2, c.c3, c.c4);
    }
    // The sequence's last keys: what lies behind them in the page is not read.
    if (ends) {
#pragma unroll 1
      for (int key = 0; key < box.size(args); key += KeyEight::kKeys) {
        TileCoord const eight{at_keys.row + key, min(max(at_keys.rows - key, 0), KeyEight::kKeys),
                              at_keys.head, at_keys.batch};
        load_tile<KeyEight::kKeys, kColumns>(tensor, eight, target + key * kColumns, full, kHint);
      }
    }
    __syncwarp();
  }

  // All lanes call it; each knows whether its box has a page.
  __device__ void tell_existing(Position at, SmallPageBox<Config> const&, bool has_page,
                                bool elected) const {
    if (!exist) {
      return;
    }
#pragma unroll
    for (int word = 0; word < Config::kKeyWords; ++word) {
      int const key = (word * (WarpLanes::kCount / 2) + WarpLanes{}.index() / 2) * KeyEight::kKeys;
      int const box = key / KeyEight::kKeys >> (args.box_keys / KeyEight::kKeys - 1);  // 8 or 16
      uint32_t const existing =
          __ballot_sync(WarpLanes::kAll, __shfl_sync(WarpLanes::kAll, int(has_page), box));
      if (elected) {
        exist[at.in_two_rounds()][word] = existing;
      }
    }
  }

  __device__ void tell_existing(Position at, LargePageBox<Config> const& box, bool has_page,
                                bool elected) const {
    if (!exist) {
      return;
    }
    unsigned const found = __ballot_sync(WarpLanes::kAll, has_page && box.keys > 0);
#pragma unroll
    for (int word = 0; word < Config::kKeyWords; ++word) {
      int const key = (word * (WarpLanes::kCount / 2) + WarpLanes{}.index() / 2) * KeyEight::kKeys;
      uint32_t existing = 0;
      if (found == __ballot_sync(WarpLanes::kAll, box.keys > 0)) {
        existing = ~uint32_t{0};  // all pages exist; the mask hides what is behind the sequence
      } else {
        // This is rare: each box says which keys are its own.
#pragma unroll 1
        for (int lane = 0; lane < WarpLanes::kCount; ++lane) {
          int const first = __shfl_sync(WarpLanes::kAll, box.first, lane);
          int const size = __shfl_sync(WarpLanes::kAll, box.box_keys, lane);
          bool const has = key >= first && key < first + size && (found >> lane & 1);
          existing |= __ballot_sync(WarpLanes::kAll, has);
        }
      }
      if (elected) {
        exist[at.in_two_rounds()][word] = existing;
      }
    }
  }
};

// Maps of K or V whose boxes have all columns; in a kernel for pages only, one for each box size.
template <class Config>
__device__ TensorMap const* k_boxes(ArgsOf<Config> const& args) {
  if constexpr (Config::kPagesOnly) {
    return args.k_boxes;
  }
  return nullptr;
}
template <class Config>
__device__ TensorMap const* v_boxes(ArgsOf<Config> const& args) {
  if constexpr (Config::kPagesOnly) {
    return args.v_boxes;
  }
  return nullptr;
}

template <class Config>
__device__ void load_k_from_pages(ArgsOf<Config> const& args, SharedStorage<Config>& smem) {
  PageLoader<Config, Config::kTileK>{args,        smem,   args.k,    k_boxes<Config>(args),
                                     smem.k_ring, smem.k, smem.exist}
      .run();
}

template <class Config>
__device__ void load_v_from_pages(ArgsOf<Config> const& args, SharedStorage<Config>& smem) {
  PageLoader<Config, Config::kTileV>{args,        smem,   args.v, v_boxes<Config>(args),
                                     smem.v_ring, smem.v, nullptr}
      .run();
}

}  // namespace flash::sm90::forward
