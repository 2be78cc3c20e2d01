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

// What a lane knows of a tile of keys: where those of its box are. `first` and `size` are multiples
// of 8, as pages are.
struct KeyBox {
  int first;  // key of the tile
  int size;   // keys of the box; 0: the lane has none
  int keys;   // keys of the sequence, from `first` on, but at most a box's
  PageSlot slot{PageSlot::kNoPage, 0};

  // The table's entry is on its way when this returns; its first use waits for it.
  __device__ void find_page(ForwardArgs const& args, int batch, int position) {
    if (keys > 0) {
      slot = KeyPages(args.params.pages, batch).slot(position);
    }
  }
  __device__ bool has_page(ForwardArgs const& args) const {
    return uint32_t(slot.page) < uint32_t(args.params.pages.count);
  }
};

// In a kernel that serves pages among others, lane l looks up the eight keys from 8 * (l / 2) on,
// of boxes of args.box_keys: the lanes whose keys have a page are then the keys that exist, in the
// order of fragment_bits (core/mask.h). In one for small pages each lane has one of a tile's boxes;
// in one for large pages, a box of the size that PageBox says.
template <class Config>
__device__ KeyBox key_box(ForwardArgs const& args, RowBlock<Config> const& block, int step) {
  int const lane = WarpLanes{}.index(), tile = block.range.block_at(step) * Config::kBlockN;
  int const left = block.keys_at.rows - tile;  // keys of the sequence from the tile's first on
  KeyBox box;
  if constexpr (!Config::kPagesOnly) {
    static_assert(Config::kBlockN <= WarpLanes::kCount / 2 * kLeastBoxRows);
    box.first = lane / 2 * kLeastBoxRows;
    bool const begins = lane % 2 == 0 && (box.first & (args.box_keys - 1)) == 0;
    box.size = begins && box.first < Config::kBlockN ? args.box_keys : 0;
    box.keys = min(left - box.first, args.box_keys);
  } else if constexpr (!Config::kLargePages) {
    static_assert(Config::kBlockN <= WarpLanes::kCount * kLeastBoxRows);
    box.first = lane * args.box_keys;
    box.size = box.first < Config::kBlockN ? args.box_keys : 0;
    box.keys = min(left - box.first, box.size);
  } else {
    static_assert(Config::kBlockN <= PageBox::kMostKeys && Config::kBlockN % PageBox::kLeast == 0);
    PageBox const large(lane, tile, left, Config::kBlockN, args.params.pages.page_size);
    box.first = large.first;
    box.size = large.size;
    box.keys = large.keys;
  }
  box.find_page(args, block.tile.batch, tile + box.first);
  return box;
}

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
template <class Config, int kStages, int kTile>
struct PageLoader {
  using Loaded = typename Config::Loaded;
  using Position = RingPosition<kStages>;
  static constexpr int kColumns = kTile / Config::kBlockN;

  ForwardArgs const& args;
  SharedStorage<Config>& smem;
  TensorMap const& tensor;
  TensorMap const* whole_boxes;  // the same by boxes of all columns, in a kernel for pages only
  Ring<kStages>& ring;
  Loaded (&buffers)[kStages][kTile];
  bool tells;  // which keys of a tile exist

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
          load_whole_boxes(block, step, blocks + step, elected);
        } else {
          load(block, step, blocks + step, elected);
        }
      }
      blocks += steps;
      smem.described.release(at);
    }
  }

  // tile: its number among all tiles.
  __device__ void load(RowBlock<Config> const& block, int step, uint32_t tile, bool elected) {
    Position const at(tile);
    KeyBox const box = key_box<Config>(args, block, step);
    ring.wait_empty(at);
    bool const has_page = box.has_page(args);
    uint32_t const existing = __ballot_sync(WarpLanes::kAll, has_page);
    Barrier& full = ring.full(at.stage);
    if (elected) {
      if (tells) {
        smem.loaded_exist(tile)[0] = existing;
      }
      full.arrive_and_expect_tx(kTile * sizeof(Loaded));
    }
    __syncwarp();
    if (box.size > 0) {
      TileCoord const at_keys{box.slot.row, has_page ? box.keys : 0, block.keys_at.head,
                              has_page ? box.slot.page : 0};
      load_tile<Config::kBlockN, kColumns>(tensor, at_keys,
                                           buffers[at.stage] + box.first * kRun<kColumns>, full,
                                           TMA::CacheHintSm90::EVICT_LAST);
    }
    __syncwarp();
  }

 private:
  __device__ void load_whole_boxes(RowBlock<Config> const& block, int step, uint32_t tile,
                                   bool elected) {
    Position const at(tile);
    KeyBox const box = key_box<Config>(args, block, step);
    ring.wait_empty(at);
    bool const has_page = box.has_page(args);
    tell_existing(tile, box, has_page, elected);
    Barrier& full = ring.full(at.stage);
    if (elected) {
      full.arrive_and_expect_tx(kTile * sizeof(Loaded));
    }
    __syncwarp();
    constexpr auto kHint = TMA::CacheHintSm90::EVICT_LAST;
    TileCoord at_keys{box.slot.row, has_page ? box.keys : 0, block.keys_at.head, box.slot.page};
    Loaded* const target = buffers[at.stage] + box.first * kColumns;
    TensorMap const& map =
        whole_boxes[Config::kLargePages ? PageBox::size_index(WarpLanes{}.index()) : 0];
    bool const ends = at_keys.rows > 0 && at_keys.rows < box.size;
    if (box.size > 0 && !ends) {
      auto const c = map.eights(at_keys);
      SM90_TMA_LOAD_5D::copy(&map.map, reinterpret_cast<uint64_t*>(&full),
                             static_cast<uint64_t>(kHint), target, 0, c.c1, c.c2, c.c3, c.c4);
    }
    // The sequence's last keys: what lies after them in the page is not read.
    if (ends) {
#pragma unroll 1
      for (int key = 0; key < box.size; key += kLeastBoxRows) {
        TileCoord const eight{at_keys.row + key, min(max(at_keys.rows - key, 0), kLeastBoxRows),
                              at_keys.head, at_keys.batch};
        load_tile<kLeastBoxRows, kColumns>(tensor, eight, target + key * kColumns, full, kHint);
      }
    }
    __syncwarp();
  }

  // Tells consumers which keys of the tile exist. All lanes call it; each knows whether its box has
  // a page.
  __device__ void tell_existing(uint32_t tile, KeyBox const& box, bool has_page,
                                bool elected) const {
    if (!tells) {
      return;
    }
    unsigned const found = __ballot_sync(WarpLanes::kAll, has_page);
    // Usually all pages exist; the mask hides what is after the sequence.
    bool const all = Config::kLargePages && found == __ballot_sync(WarpLanes::kAll, box.keys > 0);
#pragma unroll
    for (int word = 0; word < Config::kKeyWords; ++word) {
      uint32_t const existing = all ? ~uint32_t{0} : existing_keys(box, found, word);
      if (elected) {
        smem.loaded_exist(tile)[word] = existing;
      }
    }
  }

  // A word of the keys that exist. found: the lanes whose box has a page
  __device__ uint32_t existing_keys(KeyBox const& box, unsigned found, int word) const {
    // The first of the eight keys that this lane answers for
    int const key = (word * (WarpLanes::kCount / 2) + WarpLanes{}.index() / 2) * kLeastBoxRows;
    if constexpr (!Config::kLargePages) {
      int const lane = key / kLeastBoxRows >> (args.box_keys / kLeastBoxRows - 1);  // 8 or 16
      return __ballot_sync(WarpLanes::kAll, found >> lane & 1);
    } else {
      uint32_t existing = 0;
#pragma unroll 1
      for (int lane = 0; lane < WarpLanes::kCount; ++lane) {  // each box says which are its own
        int const first = __shfl_sync(WarpLanes::kAll, box.first, lane);
        int const size = __shfl_sync(WarpLanes::kAll, box.size, lane);
        bool const has = key >= first && key < first + size && (found >> lane & 1);
        existing |= __ballot_sync(WarpLanes::kAll, has);
      }
      return existing;
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
  constexpr int kTile = Config::kBlockN * Config::kLoadedK;
  PageLoader<Config, Config::kLoadedStagesK, kTile>{
      args, smem, args.k, k_boxes<Config>(args), smem.loaded_k_ring(), smem.loaded_k(), true}
      .run();
}

template <class Config>
__device__ void load_v_from_pages(ArgsOf<Config> const& args, SharedStorage<Config>& smem) {
  constexpr int kTile = Config::kBlockN * Config::kLoadedV;
  PageLoader<Config, Config::kLoadedStagesV, kTile>{
      args, smem, args.v, v_boxes<Config>(args), smem.loaded_v_ring(), smem.loaded_v(), false}
      .run();
}

}  // namespace flash::sm90::forward
