// Bulk copies from a block's shared memory to that of another block of its cluster.
#pragma once

#include <deque>
#include <optional>

#include "barriers.h"
#include "cluster.h"

namespace simt {

// As harsh as bulk_copies.h: the target is NaN from the start until no thread can go on without it,
// and the source has to stay what it was until then.
class BlockCopies : public Unit {
 public:
  void start(uint32_t rank, void const* from, void const* to, uint32_t bytes, void const* barrier) {
    Copy copy{rank, smem_address(from), smem_address(to), smem_address(barrier), {}};
    expect(*copy.from % 16 == 0 && copy.to % 16 == 0 && bytes % 16 == 0 && bytes > 0, "a copy of ",
           bytes, " bytes from ", Hex{*copy.from}, " to ", Hex{copy.to}, " is not 16-byte aligned");
    expect_fenced(*copy.from, bytes, "a copy to another block");
    char const* const source = smem_pointer(*copy.from, bytes);
    copy.bytes.assign(source, source + bytes);
    push(std::move(copy));
  }

  // A store of a thread's numbers, which has no source in shared memory.
  template <class Numbers>
  void start(uint32_t rank, Numbers const& numbers, void const* to, void const* barrier) {
    Copy copy{rank, std::nullopt, smem_address(to), smem_address(barrier), {}};
    expect(copy.to % sizeof(Numbers) == 0, "a store to ", Hex{copy.to}, " is not aligned");
    auto const* const source = reinterpret_cast<char const*>(&numbers);
    copy.bytes.assign(source, source + sizeof(Numbers));
    push(std::move(copy));
  }

  bool advance() override {
    if (copies_.empty()) {
      return false;
    }
    bool const last = block->order.newest_first;
    Copy const copy = std::move(last ? copies_.back() : copies_.front());
    last ? copies_.pop_back() : copies_.pop_front();
    int const bytes = static_cast<int>(copy.bytes.size());
    expect(
        !copy.from || std::memcmp(smem_pointer(*copy.from, bytes), copy.bytes.data(), bytes) == 0,
        "shared memory has changed before a copy to another block has read it");
    InBlock const there(copy.rank);
    async_view().write(copy.to, copy.bytes.data(), bytes);
    mbarriers().add_bytes(copy.barrier, -bytes);
    return true;
  }

  void block_ends() override {
    expect(copies_.empty(), "the block ends before ", copies_.size(),
           " of its copies to other blocks have read its shared memory");
  }

 private:
  struct Copy {
    uint32_t rank;
    std::optional<uint32_t> from;
    uint32_t to, barrier;
    std::vector<char> bytes;  // when it was issued
  };

  void push(Copy copy) {
    InBlock const there(copy.rank);
    int const bytes = static_cast<int>(copy.bytes.size());
    mbarriers().at(copy.barrier);
    expect_fenced(copy.to, bytes, "a copy from another block");
    async_view().poison(copy.to, bytes);
    copies_.push_back(std::move(copy));
  }

  std::deque<Copy> copies_;
};

inline BlockCopies& block_copies() { return block->unit<BlockCopies>(); }

}  // namespace simt
