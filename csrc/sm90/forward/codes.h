// Keys and values that are codes of 8 bits (e4m3): a warpgroup makes elements of them, on their way
// from the buffers that TMA fills to those that consumers read.
#pragma once

#include "sm90/forward/shared_storage.h"

namespace flash::sm90::forward {

// Two elements, in a word.
__device__ inline uint32_t elements_of(uint32_t halves, half_t) { return halves; }

// Every code is a number of bf16 as well, so that the upper half of its fp32 bits is all of it.
__device__ inline uint32_t elements_of(uint32_t halves, bfloat16_t) {
#if defined(__CUDA_ARCH__)
  float2 const wide = __half22float2(reinterpret_cast<__half2 const&>(halves));
  return __byte_perm(__float_as_uint(wide.x), __float_as_uint(wide.y), 0x7632);
#else
  auto const* const half = reinterpret_cast<half_t const*>(&halves);
  return pack_pair<bfloat16_t>(float(half[0]), float(half[1]));
#endif
}

// Four codes as elements. NaN stays NaN.
template <class Element>
__device__ uint2 elements_of_codes(uint32_t codes) {
  uint32_t first = 0, second = 0;
#if defined(__CUDA_ARCH__)
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(codes));
#else
  auto const* const code = reinterpret_cast<float_e4m3_t const*>(&codes);
  first = pack_pair<half_t>(float(code[0]), float(code[1]));
  second = pack_pair<half_t>(float(code[2]), float(code[3]));
#endif
  return {elements_of(first, Element{}), elements_of(second, Element{})};
}

// A tile of kRows rows of kBytes bytes as TMA writes it: in runs of kRun bytes, whose chunks of 16
// bytes are permuted by the row. Two rows of runs of 64 bytes take the place of one of 128, and so
// do four of 32 bytes.
template <int kRows, int kBytes>
struct Chunks {
  static constexpr int kRunBytes = kRun<kBytes / 2> * 2, kOfRun = kRunBytes / 16;

  // Offset of a chunk, in bytes.
  __device__ static int offset(int row, int chunk) {
    int const permuted = chunk % kOfRun ^ row / (8 / kOfRun) % kOfRun;
    return chunk / kOfRun * (kRows * kRunBytes) + row * kRunBytes + permuted * 16;
  }

  // The same `rows` rows, a multiple of 8, and `chunks` chunks, an even number, after an offset of
  // one of the first two chunks.
  __device__ static int moved(int offset, int rows, int chunks) {
    int const permuted = offset ^ chunks % kOfRun * 16;
    return permuted + chunks / kOfRun * (kRows * kRunBytes) + rows * kRunBytes;
  }
};

// Makes elements of the codes of a tile of kRows rows and kColumns columns. A lane has the same
// chunk of 16 codes of every so many rows. Of eight lanes that access shared memory together, four
// have neighbouring chunks of a row, and four the same ones of the row whose number differs in bits
// 0 and 2: they read and write all banks once. kMostAtOnce: chunks of a lane that are in registers
// at a time.
template <class Element, int kRows, int kColumns, int kWarps, int kMostAtOnce>
class TileConverter {
  using Codes = Chunks<kRows, kColumns>;
  using Elements = Chunks<kRows, 2 * kColumns>;
  static constexpr int kQuads = kColumns / 64;        // fours of chunks in a row of codes
  static constexpr int kApart = 8 * kWarps / kQuads;  // rows from a lane's chunk to the next
  static constexpr int kChunks = kRows / kApart;      // of a lane
  static constexpr int kAtOnce = kChunks <= kMostAtOnce ? kChunks : kChunks / 2;
  static_assert(kColumns % 64 == 0 && kWarps % kQuads == 0 && kRows % kApart == 0);
  static_assert(kChunks % kAtOnce == 0);

  int row, chunk;  // of the lane's first chunk
  uint4 codes[kAtOnce];

 public:
  __device__ explicit TileConverter(int warp) {
    int const lane = WarpLanes{}.index(), eighth = lane / 8;
    int const pair = warp % kQuads * (4 / kQuads) + eighth / kQuads;  // rows 0 to 3, and 5, 4, 7, 6
    row = warp / kQuads * 8 + (pair ^ (lane / 4 % 2 * 5));
    chunk = lane % 4 + eighth % kQuads * 4;
  }

  static constexpr int kRounds = kChunks / kAtOnce;

  __device__ void load(void const* from, int round) {
    auto const* const source = static_cast<char const*>(from) + Codes::offset(row, chunk);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const rows = (round * kAtOnce + i) * kApart;
      codes[i] = *reinterpret_cast<uint4 const*>(source + rows * Codes::kRunBytes);
    }
  }

  __device__ void store(void* to, int round) const {
    auto* const first = static_cast<char*>(to) + Elements::offset(row, 2 * chunk);
    auto* const second = static_cast<char*>(to) + Elements::offset(row, 2 * chunk + 1);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const offset = (round * kAtOnce + i) * kApart * Elements::kRunBytes;
      *reinterpret_cast<uint4*>(first + offset) = eight(codes[i].x, codes[i].y);
      *reinterpret_cast<uint4*>(second + offset) = eight(codes[i].z, codes[i].w);
    }
  }

 private:
  __device__ static uint4 eight(uint32_t first, uint32_t second) {
    uint2 const a = elements_of_codes<Element>(first), b = elements_of_codes<Element>(second);
    return {a.x, a.y, b.x, b.y};
  }
};

// The warps that convert, each its rows of all tiles.
template <class Config>
struct Converter {
  ForwardArgs const& args;
  SharedStorage<Config>& smem;

  __device__ void run() {
    uint32_t blocks = 0;
    for (uint32_t number = 0;; ++number) {
      typename SharedStorage<Config>::Description const at(number);
      smem.described.wait_full(at);
      RowBlock<Config> const& block = smem.row_block(number);
      if (!block.tile.valid) {
        break;
      }
      int const steps = block.range.count();
      // K is one KV block ahead of V, as it is loaded.
      for (int step = 0; step <= steps; ++step) {
        if (step < steps) {
          convert<Config::kHeadDim>(blocks + step, smem.code_rings.k, smem.codes.k, smem.k_ring,
                                    smem.k, [&](auto const&... at) { tell_existing(at...); });
        }
        if (step > 0) {
          convert<Config::kHeadDimV>(blocks + step - 1, smem.code_rings.v, smem.codes.v,
                                     smem.v_ring, smem.v, [](auto const&...) {});
        }
      }
      blocks += steps;
      smem.described.release(at);
    }
  }

 private:
  using Loaded = RingPosition<Config::kCodeStages>;
  using Position = RingPosition<Config::kStages>;

  // meanwhile(loaded, at) is called while this warp holds both buffers.
  template <int kColumns, class Codes, class Element, int kTile, class Meanwhile>
  __device__ void convert(uint32_t tile, Ring<Config::kCodeStages>& code_ring, Codes const& codes,
                          Ring<Config::kStages>& ring, Element (&elements)[Config::kStages][kTile],
                          Meanwhile meanwhile) {
    Loaded const loaded(tile);
    Position const at(tile);
    int const warp = static_cast<int>(threadIdx.x) / 32 % Config::kRewritingWarps;
    constexpr int kMostAtOnce = Config::kConverterRegisters > 40 ? 8 : 4;
    TileConverter<Element, Config::kBlockN, kColumns, Config::kRewritingWarps, kMostAtOnce>
        converter(warp);
    code_ring.wait_full(loaded);
    // Codes arrive long before the place for their elements is free. Read first, they are in
    // registers when consumers wait for that place to be filled.
    converter.load(codes[loaded.stage], 0);
    ring.wait_empty(at);
    converter.store(elements[at.stage], 0);
    if constexpr (converter.kRounds == 2) {
      converter.load(codes[loaded.stage], 1);
      converter.store(elements[at.stage], 1);
    }
    meanwhile(loaded, at);
    ring.announce(at);
    code_ring.release(loaded);
  }

  // Which keys of a tile in pages exist, as the warp that loads them has found.
  __device__ void tell_existing(Loaded const& loaded, Position const& at) const {
    int const word = static_cast<int>(threadIdx.x) % kWarpgroup;
    if (args.params.pages.table && word < Config::kKeyWords) {
      smem.exist[at.in_two_rounds()][word] = smem.code_rings.exist[loaded.stage][word];
    }
  }
};

}  // namespace flash::sm90::forward
