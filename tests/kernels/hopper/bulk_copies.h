// The TMA unit: tiles and runs of bytes between global and shared memory, beside the threads.
//
// As harsh as the PTX manual allows. What is going to be loaded is NaN from the start until no
// thread can go on without it. What is going to be stored is read when a thread waits for that, and
// reaches global memory after all blocks have ended, unless a thread waits for that as well.
#pragma once

#include <array>
#include <deque>

#include "barriers.h"
#include "cluster.h"
#include "reduce.h"
#include "tensor_map.h"

namespace simt {

// A box of a tensor in global memory, and its place in shared memory.
struct Box {
  TensorMap map;
  std::array<int, TensorMap::kMaxRank> begin;  // may be outside, on either side
  uint32_t smem;

  Box(void const* descriptor, void const* target, std::initializer_list<int> coordinates)
      : map(TensorMap::at(descriptor)), begin{}, smem(smem_address(target)) {
    expect(static_cast<int>(coordinates.size()) == map.rank, "a tensor map of rank ", +map.rank,
           " with ", coordinates.size(), " coordinates");
    std::copy(coordinates.begin(), coordinates.end(), begin.begin());
    int const align = std::max(128, map.swizzle_bytes * 8);  // where the swizzle repeats
    expect(smem % align == 0, "a box at ", Hex{smem}, " is not ", align, "-byte aligned");
    smem_pointer(smem, map.box_bytes());
  }

  // take(shared address, global address, bytes) for runs of 16 bytes at most; the part of a run
  // that is outside of the tensor has no global address.
  template <class Take>
  void for_each_run(Take take) const {
    int const per_row = map.row_bytes();
    for (int row = 0; row < map.rows(); ++row) {
      uint64_t offset = 0;  // may wrap around, as the unit's addresses do
      bool inside = true;
      for (int i = 1, rest = row; i < TensorMap::kMaxRank; rest /= map.box[i], ++i) {
        int64_t const index = int64_t{begin[i]} + rest % map.box[i];
        inside &= index >= 0 && index < map.size[i];
        offset += index * static_cast<uint64_t>(map.stride[i]);
      }
      for (int byte = 0; byte < per_row; byte += 16) {
        int64_t const first = int64_t{begin[0]} * map.element_bytes + byte;
        int64_t const end = int64_t{map.size[0]} * map.element_bytes;
        int const before = static_cast<int>(std::clamp<int64_t>(-first, 0, 16));
        int const behind = static_cast<int>(std::clamp<int64_t>(end - first, 0, 16));
        uint32_t const at = swizzled(smem + row * per_row + byte, map.swizzle_bytes);
        if (!inside || before >= behind) {
          take(at, nullptr, 16);
          continue;
        }
        if (before > 0) take(at, nullptr, before);
        take(at + before, map.address + offset + first + before, behind - before);
        if (behind < 16) take(at + behind, nullptr, 16 - behind);
      }
    }
  }
};

// Bytes that follow each other in both memories.
struct Run {
  char* global;
  uint32_t smem;
  int bytes;

  Run(void const* global, void const* smem, int bytes)
      : global(static_cast<char*>(const_cast<void*>(global))),
        smem(smem_address(smem)),
        bytes(bytes) {
    expect(reinterpret_cast<uintptr_t>(global) % 16 == 0 && this->smem % 16 == 0 &&
               bytes % 16 == 0 && bytes > 0,
           "a bulk copy of ", bytes, " bytes at ", Hex{this->smem}, " is not 16-byte aligned");
    smem_pointer(this->smem, bytes);
  }

  template <class Take>
  void for_each_run(Take take) const {
    take(smem, global, bytes);
  }
};

// Either, taken apart: what a copy still has to know.
struct Piece {
  uint32_t smem;
  char* global;  // null: outside of the tensor
  int bytes;
};

template <class Area>
std::vector<Piece> pieces(Area const& area) {
  std::vector<Piece> all;
  area.for_each_run(
      [&](uint32_t smem, char* global, int bytes) { all.push_back({smem, global, bytes}); });
  return all;
}

// ---- loads --------------------------------------------------------------------------------------

class BulkLoads : public Unit {
 public:
  template <class Area>
  void start(Area const& area, uint32_t barrier) {
    mbarriers().at(barrier);
    Load& load = loads_.emplace_back(Load{barrier, pieces(area)});
    for (Piece const& piece : load.pieces) {
      expect_fenced(piece.smem, piece.bytes, "a bulk load");
      async_view().poison(piece.smem, piece.bytes);
    }
  }

  bool advance() override {
    if (loads_.empty()) {
      return false;
    }
    bool const last = block->order.newest_first;
    Load const load = std::move(last ? loads_.back() : loads_.front());
    last ? loads_.pop_back() : loads_.pop_front();
    int64_t bytes = 0;
    constexpr char kZeros[16] = {};
    for (Piece const& piece : load.pieces) {
      async_view().write(piece.smem, piece.global ? piece.global : kZeros, piece.bytes);
      bytes += piece.bytes;
    }
    mbarriers().add_bytes(load.barrier, -bytes);
    return true;
  }

  void block_ends() override {
    expect(loads_.empty(), "the block ends before ", loads_.size(), " of its bulk loads do");
  }

 private:
  struct Load {
    uint32_t barrier;
    std::vector<Piece> pieces;
  };
  std::deque<Load> loads_;
};

inline BulkLoads& bulk_loads() { return block->unit<BulkLoads>(); }

// A load of each block in the mask, to the same place and mbarrier there. They come one by one.
template <class Area>
void start_multicast(Area const& area, uint32_t barrier, uint32_t mask) {
  expect(mask != 0, "a multicast load of no block");
  for (uint32_t rank = 0; mask >> rank != 0; ++rank) {
    if (mask >> rank & 1) {
      InBlock const there(rank);
      bulk_loads().start(area, barrier);
    }
  }
}

// ---- stores -------------------------------------------------------------------------------------

// Bytes on their way to global memory.
struct BulkStore {
  std::vector<Piece> pieces;
  Reduce reduce;
  std::vector<char> bytes;  // of all pieces, when it was issued

  template <class Area>
  BulkStore(Area const& area, Reduce reduce)
      : pieces(simt::pieces(area)), reduce(reduce), bytes(read()) {}

  std::vector<char> read() const {
    std::vector<char> all;
    for (Piece const& piece : pieces) {
      char const* const from = smem_pointer(piece.smem, piece.bytes);
      all.insert(all.end(), from, from + piece.bytes);
    }
    return all;
  }

  void land() const {
    char const* from = bytes.data();
    for (Piece const& piece : pieces) {
      if (piece.global) {
        reduce(piece.global, from, piece.bytes);
      }
      from += piece.bytes;
    }
  }
};

// Stores of all blocks of a launch that no thread has waited for.
inline std::vector<BulkStore> late_stores;

inline void finish_stores() {
  for (BulkStore const& store : late_stores) {
    store.land();
  }
  late_stores.clear();
}

class BulkStores : public Unit {
 public:
  template <class Area>
  void start(Area const& area, Reduce reduce) {
    BulkStore const& store = mine().open.emplace_back(area, reduce);
    for (Piece const& piece : store.pieces) {
      expect_fenced(piece.smem, piece.bytes, "a bulk store");
    }
  }

  void commit() { mine().unread.push_back(std::exchange(mine().open, {})); }

  // All but the last `pending` groups have read shared memory.
  void wait_read(size_t pending) {
    struct Read : Wait {
      OfThread const& of;
      explicit Read(OfThread const& of) : Wait(of.read), of(of) {}
      bool over() const override { return of.unread.size() <= of.wanted; }
      std::string what() const override { return "bulk stores"; }
    } const read{mine()};
    mine().wanted = pending;
    wait_for(read);
    mine().wanted = kAny;
  }

  // One group that a thread waits for reads.
  bool advance() override {
    for (OfThread& of : of_) {
      if (of.unread.size() > of.wanted) {
        for (BulkStore const& store : of.unread.front()) {
          expect(store.read() == store.bytes,
                 "shared memory has changed before a bulk store has read it");
        }
        of.unwritten.push_back(std::move(of.unread.front()));
        of.unread.pop_front();
        ++of.read;
        return true;
      }
    }
    return false;
  }

  // All but the last `pending` groups have reached global memory.
  void wait_written(size_t pending) {
    wait_read(pending);
    OfThread& of = mine();
    while (of.unread.size() + of.unwritten.size() > pending) {
      for (BulkStore const& store : of.unwritten.front()) {
        store.land();
      }
      of.unwritten.pop_front();
    }
  }

  void thread_ends(int thread) override {
    OfThread& of = of_[thread];
    expect(of.open.empty() && of.unread.empty(),
           "it ends before its bulk stores have read shared memory");
    for (Group& group : of.unwritten) {
      std::move(group.begin(), group.end(), std::back_inserter(late_stores));
    }
    of.unwritten.clear();
  }

 private:
  using Group = std::vector<BulkStore>;
  static constexpr size_t kAny = -1;
  struct OfThread {
    Group open;
    std::deque<Group> unread;
    std::deque<Group> unwritten;
    size_t wanted = kAny;  // groups that may stay unread
    int read = 0;          // groups that no longer are
  };

  OfThread& mine() { return of_[block->current]; }

  std::vector<OfThread> of_ = std::vector<OfThread>(block->threads.size());
};

inline BulkStores& bulk_stores() { return block->unit<BulkStores>(); }

}  // namespace simt
