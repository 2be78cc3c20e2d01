// The delta warp: with ordered dQ, an otherwise idle warp of each CTA computes D
// (passes/backward/row_stats.h) while consumers work, row block by row block in the order in which
// tiles reach them. So no pass over all of dO and O comes before. The delta warp waits for no other
// warp; the producer warp waits for it. dO and O come by TMA: loads would wait behind the
// consumers' additions.
#pragma once

#include "passes/backward/row_stats.h"
#include "sm90/backward/dq_semaphore.h"

namespace flash::sm90::backward {

// Index of the delta warp in the producer's warpgroup, after the warps of the dQ semaphore.
constexpr int kDeltaWarp = kDqSemaphoreWarps + 1;

// Tiles of few rows that only the delta warp fills and reads.
template <class Config>
struct DeltaTiles {
  using Element = typename Config::Element;
  static constexpr int kRows = Config::kDeltaRows, kStages = Config::kDeltaStages;
  static constexpr int kElements = kRows * Config::kHeadDimV;

  alignas(1024) Element dout[kStages][kElements];
  alignas(1024) Element out[kStages][kElements];
  alignas(8) uint64_t full_[kStages];
  WorkTile row_blocks[2];  // the one whose D is computed, and the next: registers are few

  __device__ Barrier& full(int stage) { return reinterpret_cast<Barrier&>(full_[stage]); }
  __device__ WorkTile& row_block(uint32_t number) { return row_blocks[number % 2]; }

  __device__ void init() {
    for (int stage = 0; stage < kStages; ++stage) {
      full(stage).init(1);
    }
  }
};

struct NoDeltaTiles {
  __device__ void init() {}
};

template <class Config>
using DeltaTilesOf = std::conditional_t<Config::kComputesDelta, DeltaTiles<Config>, NoDeltaTiles>;

// Dot product of eight columns, 16 bytes of each operand; added one after the other.
template <class Element>
__device__ __forceinline__ float dot_of_chunk(uint4 const& a, uint4 const& b) {
  uint32_t const x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
      auto const as_float = [](uint32_t word) { return reinterpret_cast<float const&>(word); };
      sum += as_float(x[i] << 16) * as_float(y[i] << 16);
      sum += as_float(x[i] & 0xffff0000u) * as_float(y[i] & 0xffff0000u);
    } else {
      auto const lower = [](uint32_t word) {
        return float(Element::bitcast(static_cast<uint16_t>(word)));
      };
      sum += lower(x[i]) * lower(y[i]);
      sum += lower(x[i] >> 16) * lower(y[i] >> 16);
    }
  }
  return sum;
}

// All lanes call its functions together.
template <class Config>
struct DeltaWarp {
  using Element = typename Config::Element;
  using Tiles = DeltaTiles<Config>;
  using Position = RingPosition<Tiles::kStages>;
  static constexpr unsigned kAll = 0xffffffffu;  // lanes
  static constexpr int kRows = Tiles::kRows, kAhead = Tiles::kStages - 1;
  static constexpr int kTiles = Config::kBlockM / kRows;  // of a row block
  // Rows whose D is written together, one by each lane; and rows whose D is computed together, each
  // by four lanes.
  static constexpr int kPartRows = 32, kParts = Config::kBlockM / kPartRows;
  static constexpr int kLanes = 4, kDotRows = 32 / kLanes;
  static_assert(kAhead <= kTiles && kRows % kDotRows == 0 && kPartRows % kRows == 0);

  BackwardArgs const& args;
  Tiles& tiles;
  uint32_t read = 0;        // tiles so far
  float lse = 0.f;          // of the next part
  int* computed = nullptr;  // counter of the row block before, not yet incremented

  __device__ void run() {
    describe(0, draw());
    describe(1, draw());
    int after = draw();  // its number arrives while D of others is computed
    for (int tile = 0; tile < kAhead; ++tile) {
      ask(0, tile, tile);
    }
    lse = lse_of_part(0, 0);
    for (uint32_t number = 0; tiles.row_block(number).valid; ++number) {
      compute(number);
      WorkTile const& here = tiles.row_block(number);
      computed = args.params.workspace.deltas_done + here.batch * args.params.heads_q + here.head;
      describe(number + 2, after);
      after = draw();
    }
    announce();
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static bool elected() { return lane() == 0; }

  __device__ RowBlockOrder order() const { return {args.params, Config::kBlockM}; }

  // Draws the next row block; its number is in the first lane when it arrives.
  __device__ int draw() const {
    return elected() ? atomicAdd(args.params.workspace.deltas_done + order().all_heads(), 1) : 0;
  }

  __device__ void describe(uint32_t number, int drawn) const {
    __syncwarp();
    if (elected()) {
      tiles.row_block(number) = order().at(drawn);
    }
    __syncwarp();
  }

  // Starts the loads of a tile of a row block, if there is one.
  __device__ void ask(uint32_t number, int tile, uint32_t into) const {
    __syncwarp();  // all lanes have read what was there
    WorkTile const& from = tiles.row_block(number);
    if (elected() && from.valid) {
      int const stage = Position(into).stage;
      int const row = from.m_block * Config::kBlockM + tile * kRows;
      int const rows = min(max(args.params.seqlens.seqlen_q - row, 0), kRows);
      TileCoord const at{row, rows, from.head, from.batch};
      Barrier& full = tiles.full(stage);
      full.arrive_and_expect_tx(2 * Tiles::kElements * sizeof(Element));
      constexpr auto kOften = TMA::CacheHintSm90::EVICT_LAST;  // tiles read it soon
      constexpr auto kOnce = TMA::CacheHintSm90::EVICT_FIRST;
      load_tile<kRows, Config::kHeadDimV>(args.delta_dout, at, tiles.dout[stage], full, kOften);
      load_tile<kRows, Config::kHeadDimV>(args.delta_out, at, tiles.out[stage], full, kOnce);
    }
    __syncwarp();
  }

  // Computes D of a row block; the first tiles of the next one are loaded meanwhile.
  __device__ void compute(uint32_t number) {
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      float const its_lse = lse;
      bool const same = part + 1 < kParts;
      lse = same ? lse_of_part(number, part + 1) : lse_of_part(number + 1, 0);
      float dot = 0.f;
#pragma unroll 1
      for (int row = 0; row < kPartRows; row += kRows) {
        int const tile = (part * kPartRows + row) / kRows + kAhead;
        ask(number + (tile >= kTiles), tile % kTiles, read + kAhead);
        Position const at(read++);
        tiles.full(at.stage).wait(at.phase);
        compiler_fence();
#pragma unroll 1
        for (int first = 0; first < kRows; first += kDotRows) {
          float const its = __shfl_sync(kAll, dot_of(at.stage, first + lane() / kLanes),
                                        lane() % kDotRows * kLanes);
          dot = lane() / kDotRows == (row + first) / kDotRows ? its : dot;
        }
      }
      if (part == 0) {
        announce();
      }
      RowPlace const at = place_of(number, part);
      write_row(args.params, query_tile<Config>(), at, exists(at), true, its_lse, dot);
    }
  }

  // Dot product of a row of a tile, in four lanes, added in the preprocess's order
  // (passes/backward/preprocess.h), so that D has the same bits. The swizzle moves a row's eights
  // by bits of the row's number.
  __device__ float dot_of(int stage, int row) const {
    constexpr int kRunColumns = kRun<Config::kHeadDimV>, kColumns = kLanes * 8;
    constexpr int kSteps = Config::kHeadDimV / kColumns;
    int const swizzle = kRunColumns == 64 ? row % 8 : row / 2 % 4;
    float sums[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      int const column = step * kColumns;
      int const piece = (column % kRunColumns / 8 + lane() % kLanes) ^ swizzle;
      int const at = (column / kRunColumns * kRows + row) * kRunColumns + piece * 8;
      sums[step] = dot_of_chunk<Element>(*reinterpret_cast<uint4 const*>(tiles.dout[stage] + at),
                                         *reinterpret_cast<uint4 const*>(tiles.out[stage] + at));
    }
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2) {
#pragma unroll
      for (int step = 0; step < apart && step + apart < kSteps; ++step) {
        sums[step] += sums[step + apart];
      }
    }
    float const sum = sums[0] + __shfl_xor_sync(kAll, sums[0], 2);
    return sum + __shfl_xor_sync(kAll, sum, 1);
  }

  // A lane's row of a part.
  __device__ RowPlace place_of(uint32_t number, int part) const {
    WorkTile const& tile = tiles.row_block(number);
    int const in_block = part * kPartRows + lane();
    return {tile, tile.m_block * Config::kBlockM + in_block, order().index(tile), in_block};
  }
  __device__ bool exists(RowPlace const& at) const {
    return at.tile.valid && at.row < args.params.seqlens.seqlen_q;
  }
  __device__ float lse_of_part(uint32_t number, int part) const {
    RowPlace const at = place_of(number, part);
    return lse_of(args.params, at, exists(at));
  }

  // Announces the row block before, whose D was written long ago, so that no lane waits for the
  // stores.
  __device__ void announce() const {
    __syncwarp();
    if (elected() && computed) {
      release_count(computed);
    }
  }
};

// Waits until D of all of a tile's heads is there, for copies that a thread of the warp starts. All
// lanes read the counter and vote, so that they stay together for ptxas, too: if one lane read it
// for all of them, the loop that loads would spill.
template <class Config>
__device__ __forceinline__ void wait_for_delta(BwdParams const& p, KeyBlock<Config> const& block) {
  int const row_blocks = num_blocks(block.seqlen_q, Config::kBlockM);
  int const* const computed =
      p.workspace.deltas_done + block.tile.batch * p.heads_q + block.head_begin;
#pragma unroll 1
  for (int head = 0; head < block.heads; ++head) {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
    while (__any_sync(0xffffffffu, acquire_count(computed + head) < row_blocks)) {
      __nanosleep(20);
    }
#else  // the emulator takes a vote for progress, and would let no other thread run
    while (acquire_count(computed + head) < row_blocks) {
      __nanosleep(20);
    }
#endif
  }
#if defined(__CUDA_ARCH__)
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

}  // namespace flash::sm90::backward
