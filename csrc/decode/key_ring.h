// Loads one warp's K and V from global to shared memory, several steps ahead, without any barrier
// of the CTA.
#pragma once

#include "core/copy_async.h"
#include "decode/tile_rows.h"

namespace flash::decode {

// A warp's steps are kBlockN keys each, kWarps * kBlockN apart. K and V are cp.async groups of
// their own: K's buffer is filled again as soon as Q·Kᵀ is done with it, so that nearly the whole
// ring is always on its way.
template <class Config>
struct KeyRing {
  using Cached = typename Config::Cached;
  static constexpr int kN = Config::kBlockN;
  static constexpr int kChunk = 16 / sizeof(Cached);  // columns of a lane's 16 bytes

  FwdParams const& p;
  RingStorage<Config>& ring;
  DecodeWork<Config> const& work;
  int lane;
  int key;           // this lane's key of the sequence in the step that is looked up next
  PageSlot next;     // of this lane's key in the step that is loaded next; read ahead
  PageSlot current;  // of its key in the step whose K was loaded last
  unsigned exist[Config::kStages];  // which keys of the steps on their way exist, a bit each

  // This warp takes every kWarps-th step of the keys [begin, end).
  __device__ KeyRing(FwdParams const& p_, DecodeWork<Config> const& work_,
                     RingStorage<Config>& ring_, int warp, int lane_)
      : p(p_), ring(ring_), work(work_), lane(lane_), key(work.begin + warp * kN + lane_) {
    look_up();
  }

  // Bits of the keys that exist in the step at the ring's head.
  __device__ unsigned existing() const { return exist[0]; }

  // Loads the ring's first steps, [stage, end). Cold code takes the time here, hence no unrolling.
  __device__ void fill(int& stage, int end) {
#pragma unroll 1
    for (; stage < end; ++stage) {
      load_k(stage);
      load_v(stage);
    }
  }

  __device__ void load_k(int stage) {
    current = next;
    bool const mine = work.pages.exists(current);
#pragma unroll
    for (int s = 0; s + 1 < Config::kStages; ++s) {
      exist[s] = exist[s + 1];
    }
    exist[Config::kStages - 1] = __ballot_sync(0xffffffffu, mine);
    look_up();
    if constexpr (Config::kCodes) {
      load_descales(p.codes.k, ring.k_descales[stage]);
    }
    load<Config::kHeadDim>(work.k, p.k, ring.k[stage].data(), p.head_dim, p.odd.columns_k);
  }

  __device__ void load_v(int stage) {
    if constexpr (Config::kCodes) {
      load_descales(p.codes.v, ring.v_descales[stage]);
    }
    load<Config::kHeadDimV>(work.v, p.v, ring.v[stage].data(), p.head_dim_v, p.odd.columns_v);
  }

  // Waits until the oldest cp.async group has arrived, for all lanes.
  __device__ void wait() const {
    cp_async_wait<2 * Config::kStages - 1>();
    __syncwarp();
  }

 private:
  // Only reads the table: whether the page exists is checked when it is needed, a step later.
  __device__ void look_up() {
    bool const exists = lane < kN && key < work.end;
    int const first = static_cast<int>(work.tile.info.row_k);
    next = exists ? work.pages.slot(first + key) : PageSlot{PageSlot::kNoPage, 0};
    key += Config::kWarps * kN;
  }

  // They are of the cp.async group that comes next.
  __device__ void load_descales(Descale const& descale, float* target) {
    using CopyOp = SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>;
    if (descale.of_rows && lane < kN) {
      bool const exists = exist[Config::kStages - 1] >> lane & 1;
      float const* const source =
          descale.of_row(exists ? current.page : 0, current.row, work.tile.head_kv);
      CopyOp::copy(*source, target[lane], exists);
    }
  }

  template <int kColumns>
  __device__ void load(Cached const* head, TensorView<const void> const& view, Cached* target,
                       int columns, int odd_columns) {
    if constexpr (Config::kScores == ScoreLevel::Full) {
      if (odd_columns > 0) [[unlikely]] {
        load_odd<kColumns>(head, view, target, odd_columns);
        cp_async_fence();  // a cp.async group, even if it is empty: the ring counts them
        return;
      }
    }
    // Rows of 96 and 112 columns end in the first half of a line or a little after it. The rest is
    // the next head's, which reads it later or has it already: not to fetch it saves up to 11% (d
    // 96 and 112, H100); other rows end elsewhere, and gain nothing.
    constexpr int kLine = 128 / sizeof(Cached);
    bool const ends_early = kColumns == 2 * kLine && columns % kLine >= kLine / 2;
    if (ends_early) {
      load_chunks<kColumns, 64>(head, view, target, columns);
    } else {
      load_chunks<kColumns, 128>(head, view, target, columns);
    }
    cp_async_fence();
  }

  // Loads rows that are not multiples of 16 bytes: with cp.async of 8 or 4 bytes, the larger one
  // that divides all rows' addresses and lengths, else element by element.
  template <int kColumns>
  __device__ void load_odd(Cached const* head, TensorView<const void> const& view, Cached* target,
                           int columns) {
    uint64_t const elements = view.batch_stride | view.row_stride | columns;
    auto const bytes =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(head) | elements * sizeof(Cached));
    if (bytes % sizeof(uint64_t) == 0) {
      load_words<uint64_t, kColumns>(head, view, target, columns);
    } else if (bytes % sizeof(uint32_t) == 0) {
      load_words<uint32_t, kColumns>(head, view, target, columns);
    } else {
      load_elements<kColumns>(head, view, target, columns);
    }
  }

  template <class Word, int kColumns>
  __device__ void load_words(Cached const* head, TensorView<const void> const& view, Cached* target,
                             int columns) {
    using CopyOp = SM80_CP_ASYNC_CACHEALWAYS_ZFILL<Word>;
    constexpr int kElements = sizeof(Word) / sizeof(Cached);
    for_each_chunk<kColumns>(head, view, [&](Cached const* source, int at, int col, bool exists) {
#pragma unroll
      for (int i = 0; i < kChunk; i += kElements) {
        CopyOp::copy(*reinterpret_cast<Word const*>(source + i),
                     *reinterpret_cast<Word*>(target + at + i), exists && col + i < columns);
      }
    });
  }

  // Loads rows at any address. cp.async cannot do that, so these are ordinary loads.
  template <int kColumns>
  __device__ void load_elements(Cached const* head, TensorView<const void> const& view,
                                Cached* target, int columns) {
    for_each_chunk<kColumns>(head, view, [&](Cached const* source, int at, int col, bool exists) {
      cutlass::AlignedArray<Cached, kChunk> chunk;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        chunk[i] = exists && col + i < columns ? source[i] : Cached(0);
      }
      *reinterpret_cast<cutlass::AlignedArray<Cached, kChunk>*>(target + at) = chunk;
    });
  }

  // How a warp's lanes share a tile: each has 16 bytes of a row, and eight lanes (fewer in a short
  // row) have a run of it.
  template <int kColumns>
  struct Lanes {
    static constexpr int kOfRow = cute::min(8, kColumns / kChunk);
    static constexpr int kRun = kOfRow * kChunk;  // columns
    static constexpr int kRows = 32 / kOfRow;     // at a time
    using Layout = CachedTile<Cached, kN, kColumns>;
  };

  // Calls load(source, at, col, exists) for the lane's chunks: kChunk columns from `col` on of a
  // key, which may not exist; `at` is their place in the buffer.
  template <int kColumns, class Load>
  __device__ void for_each_chunk(Cached const* head, TensorView<const void> const& view,
                                 Load load) {
    using L = Lanes<kColumns>;
    typename L::Layout const layout{};
    int64_t const mine = view.offset(current.page, current.row, 0);
#pragma unroll 1
    for (int row = lane / L::kOfRow; row < kN; row += L::kRows) {
      Cached const* source = head + __shfl_sync(0xffffffffu, mine, row);
      bool const exists = exist[Config::kStages - 1] >> row & 1;
#pragma unroll 1
      for (int col = lane % L::kOfRow * kChunk; col < kColumns; col += L::kRun) {
        load(source + col, layout(row, col), col, exists);
      }
    }
  }

  // kFetch: bytes that L2 fetches at a time.
  template <int kColumns, int kFetch>
  __device__ void load_chunks(Cached const* head, TensorView<const void> const& view,
                              Cached* target, int columns) {
    using L = Lanes<kColumns>;
    typename L::Layout const layout{};
    int const first = lane / L::kOfRow, col = lane % L::kOfRow * kChunk;
    // A lane computes the offset of its own key, and passes it to the others by shuffles.
    int64_t const mine = view.offset(current.page, current.row, 0);
    unsigned const exists = exist[Config::kStages - 1] >> first;
    // The swizzle repeats every 8 rows, so two addresses plus constants reach all rows.
    Cached* const targets[2] = {target + layout(first, col), target + layout((first + 4) % 8, col)};
#pragma unroll
    for (int row = 0; row < kN; row += L::kRows) {
      Cached const* source = head + __shfl_sync(0xffffffffu, mine, row + first) + col;
#pragma unroll
      for (int run = 0; run < kColumns; run += L::kRun) {
        // Keys and columns that do not exist become zero, whatever lies there: 0 · NaN is NaN.
        copy_chunk_async<kFetch>(
            *reinterpret_cast<uint128_t const*>(source + run),
            *reinterpret_cast<uint128_t*>(targets[row / 4 % 2] + layout(row / 8 * 8, run)),
            (exists >> row & 1) && col + run < columns);
      }
    }
  }
};

}  // namespace flash::decode
