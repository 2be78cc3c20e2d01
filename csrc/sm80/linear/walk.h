// What the kernels share that walk along a segment: chunk after chunk, the state in registers
// from the first to the last. A warp has a few columns of V and all rows of K, up to 128, so that a
// state is read where it is summed, and no warp needs another's. Above, warps share the rows of K.
#pragma once

#include "core/dynamic_smem.h"
#include "core/early_launch.h"
#include "linear/tilings.h"
#include "sm80/linear/accumulator_rows.h"
#include "sm80/linear/weights.h"

namespace flash::sm80::linear {

template <class Element_, flash::linear::WalkTiling tiling_>
struct WalkShape {
  using Element = Element_;
  static constexpr flash::linear::WalkTiling tiling = tiling_;
  static constexpr int kChunk = tiling.chunk, kStrips = kChunk / 16;
  static constexpr int kK = tiling.k_tile, kV = tiling.v_tile(), kHeads = tiling.heads;
  static constexpr int kOfWarp = tiling.v_of_warp, kWarpsV = tiling.warps_v,
                       kWarpsK = tiling.warps_k;
  static constexpr int kRows = kK / kWarpsK;  // of K, of a warp's state
  static constexpr int kWarps = kWarpsV * kWarpsK * kHeads, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kOfWarp / 16;                  // of a warp's columns
  static constexpr int kSquares = kStrips * (kStrips + 1) / 2;  // on the diagonal and below it
  static constexpr int kResident = tiling.resident;
  // From the last token to the first, for gradients of states.
  static constexpr bool kReverse = false;
};

template <class Element, int kTiling>
struct WalkConfig : WalkShape<Element, flash::linear::kWalkTilings[kTiling]> {};

// A square of A, a strip's 16 rows against an earlier strip's columns, or its own.
__device__ constexpr int square_of(int strip, int other) { return strip * (strip + 1) / 2 + other; }

// The strip of a square below the diagonal, numbered by strips: 1, 2, 2, 3, 3, 3.
__device__ constexpr int strip_below(int number) {
  int strip = 1;
  while (number >= strip * (strip + 1) / 2) {
    ++strip;
  }
  return strip;
}

// Decays inside a chunk, by token.
template <int kChunk>
struct ChunkDecays {
  alignas(16) Cumulated cumulated[kChunk];
  alignas(16) float to_end[kChunk];      // of the token's strip
  alignas(16) float from_begin[kChunk];  // of the token's strip
  alignas(16) float before[kChunk];      // from the chunk's begin
  alignas(16) float left[kChunk];        // at the chunk's end

  // One warp calls it.
  __device__ void set(flash::linear::LogDecays<kChunk> const& logs) {
    flash::linear::cumulate<kChunk>(logs, cumulated);
    __syncwarp();
    StripDecays const decay{cumulated};
#pragma unroll
    for (int i = 0; i < kChunk / 32; ++i) {
      int const t = i * 32 + threadIdx.x % 32;
      to_end[t] = decay.to_end(t);
      from_begin[t] = decay.from_begin(t);
      before[t] = decay_between({0.f, 0}, cumulated[t]);
      left[t] = decay_between(cumulated[t], cumulated[kChunk - 1]);
    }
  }
  // What is left of the state before the chunk.
  __device__ float total() const { return before[kChunk - 1]; }
};

// Stateᵀ of a warp, (kOfWarp, kRows), as accumulators: of 16 columns of V and 8 rows of K each.
template <class C>
using WalkState = float[C::kBlocks][C::kRows / 8][4];

// Where the numbers of a lane's accumulator are in a CTA's tile of the state, and in which order
// launches leave each other the accumulators: by warp along K, by 16 columns of V, by 8 rows of K.
template <class C>
struct StatePlace {
  int k;  // of numbers 0 and 2; 1 and 3 are in the next row
  int v;  // of numbers 0 and 1; 2 and 3 are 8 columns further

  static constexpr int kSquares = C::kV / 16 * (C::kK / 8);  // of a tile

  __device__ static int number(int warp_k, int block, int n) {
    return (warp_k * (C::kV / 16) + block) * (C::kRows / 8) + n;
  }
  __device__ static StatePlace of(int number, int lane) {
    int const n = number % (C::kRows / 8), block = number / (C::kRows / 8) % (C::kV / 16);
    int const warp_k = number / (C::kRows / 8) / (C::kV / 16);
    return {warp_k * C::kRows + n * 8 + lane % 4 * 2, block * 16 + lane / 4};
  }
};

// The CTA's tile and segment, and the warp's rows of K, columns of V and head in it.
template <class C>
struct Walk {
  using Element = typename C::Element;
  ForwardParams const& p;
  Tile tile;
  flash::linear::Chunk segment;
  int column = threadIdx.x / 32 % C::kWarpsV;               // warp along V
  int warp_k = threadIdx.x / 32 / C::kWarpsV % C::kWarpsK;  // warp along K
  int h = threadIdx.x / 32 / C::kWarpsV / C::kWarpsK;       // head of the CTA

  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int head() const { return tile.head + h; }
  __device__ int heads() const {
    int const left = p.heads - tile.head;
    return left < C::kHeads ? left : C::kHeads;
  }
  __device__ bool exists() const { return head() < p.heads; }
  // Whether this warp has the strip's sums: one of the warps that share the rows of K does.
  __device__ bool owns(int strip) const { return C::kWarpsK == 1 || strip % C::kWarpsK == warp_k; }
  // The warp that computes its head's decays.
  __device__ bool has_decays() const {
    return column == C::kWarpsV - 1 && warp_k == C::kWarpsK - 1 && exists();
  }
  // Whether the walk along the sequence begins, or ends, with this segment, and the segment whose
  // state this one's sums are for.
  __device__ bool begins() const { return C::kReverse ? segment.last : segment.index == 0; }
  __device__ bool ends() const { return C::kReverse ? segment.index == 0 : segment.last; }
  __device__ int next_slot() const { return tile.slot + (C::kReverse ? -1 : 1); }
  __device__ int chunks() const {
    return flash::linear::chunks_of(segment.tokens.count, C::kChunk);
  }
  __device__ flash::linear::Tokens chunk(int number) const {
    auto const& all = segment.tokens;
    int const begin = number * C::kChunk, left = all.count - begin;
    return {all.batch, all.row + begin, left < C::kChunk ? left : C::kChunk};
  }
  // The walk's first step of a chunk is number 0.
  __device__ static int strip_in_order(int number) {
    return C::kReverse ? C::kStrips - 1 - number : number;
  }
  // The walk's first chunk is number 0.
  __device__ flash::linear::Tokens chunk_in_order(int number) const {
    return chunk(C::kReverse ? chunks() - 1 - number : number);
  }
  __device__ flash::linear::Tokens first_tokens() const {
    return C::kReverse ? chunk_in_order(0) : segment.tokens;
  }
  __device__ flash::linear::LogDecays<C::kChunk> logs(int number) const {
    return flash::linear::log_decays<C::kChunk, Element>(p.gate, chunk(number), head());
  }

  // Calls use(number, k, v) for the numbers of a warp's state, of the tensor's rows and columns.
  template <class Use>
  __device__ void for_state(WalkState<C>& state, Use use) const {
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < C::kRows / 8; ++n) {
        auto const place = StatePlace<C>::of(square(m, n), lane());
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int const k = place.k + e % 2, v = tile.v_begin + place.v + e / 2 * 8;
          if (k < p.k_dim && v < p.v_dim) {
            use(state[m][n][e], k, v);
          }
        }
        // Beside so large a state there are no registers for the addresses of all of it at once.
        if constexpr (C::kRows > 128) {
          if (n % 8 == 7) {
            __syncwarp();
          }
        }
      }
    }
  }
  __device__ int square(int m, int n) const {
    return StatePlace<C>::number(warp_k, column * C::kBlocks + m, n);
  }
  __device__ void read_initial(WalkState<C>& state) const {
    if (p.initial.ptr) {
      for_state(state,
                [&](float& x, int k, int v) { x = *p.initial.at(segment.sequence, head(), k, v); });
    }
  }
  __device__ void write_final(WalkState<C>& state) const {
    if (p.final.ptr) {
      for_state(state,
                [&](float& x, int k, int v) { *p.final.at(segment.sequence, head(), k, v) = x; });
    }
  }
  // The state of a segment, as launches leave it to each other.
  __device__ void read_slot(LinearTiles const& grid, int slot, WalkState<C>& state) const {
    float4 const* const before = state_of_slot(grid, slot);
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < C::kRows / 8; ++n) {
        float4 const x = __ldcg(before + (m * C::kRows / 8 + n) * 32);
        state[m][n][0] = x.x;
        state[m][n][1] = x.y;
        state[m][n][2] = x.z;
        state[m][n][3] = x.w;
      }
    }
  }
  __device__ void write_slot(LinearTiles const& grid, int slot, WalkState<C> const& state) const {
    float4* const out = state_of_slot(grid, slot);
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < C::kRows / 8; ++n) {
        float const(&x)[4] = state[m][n];
        out[(m * C::kRows / 8 + n) * 32] = {x[0], x[1], x[2], x[3]};
      }
    }
  }

  // Where it is: as registers have it.
  __device__ float4* state_of_slot(LinearTiles const& grid, int slot) const {
    int64_t const number = (int64_t(slot) * p.heads + head()) * grid.tiles_v + tile.v_begin / C::kV;
    return reinterpret_cast<float4*>(p.workspace.sums) +
           (number * StatePlace<C>::kSquares + square(0, 0)) * 32 + lane();
  }
};

// The tiles of a tensor's rows of all heads of a CTA, chunk after chunk of the walk.
template <class C, int kColumns>
class WalkTiles {
  using Element = typename C::Element;
  using Stream = TileStream<C::kChunk, kColumns, C::kThreads, Element, C::kReverse>;

  TensorView<void const> const& x_;
  Walk<C> const& walk_;
  bool const aligned_;
  Stream streams_[C::kHeads];

  template <int... kOf>
  __device__ WalkTiles(Walk<C> const& walk, TensorView<void const> const& x, int shared, int begin,
                       int columns, bool aligned, std::integer_sequence<int, kOf...>)
      : x_(x),
        walk_(walk),
        aligned_(aligned),
        streams_{
            Stream(rows_of<Element>(x, walk.first_tokens(), (walk.tile.head + kOf) / shared, begin),
                   x.row_stride, columns - begin)...} {}

 public:
  // shared: heads that share one of x's. begin: of the tile's columns.
  __device__ WalkTiles(Walk<C> const& walk, TensorView<void const> const& x, int shared, int begin,
                       int columns, bool aligned)
      : WalkTiles(walk, x, shared, begin, columns, aligned,
                  std::make_integer_sequence<int, C::kHeads>{}) {}

  // Starts to bring the next chunk's.
  __device__ void load(int rows, Element (&out)[C::kHeads][C::kChunk * kColumns]) {
#pragma unroll
    for (int of = 0; of < C::kHeads; ++of) {
      if (of < walk_.heads()) {
        streams_[of].load(x_.row_stride, out[of], rows, aligned_);
      }
    }
  }
};

template <class C>
__device__ WalkTiles<C, C::kK> tiles_of_k(Walk<C> const& walk, TensorView<void const> const& x) {
  return {walk, x, walk.p.group, 0, walk.p.k_dim, walk.p.aligned_k};
}
template <class C>
__device__ WalkTiles<C, C::kV> tiles_of_v(Walk<C> const& walk) {
  return {walk, walk.p.v, 1, walk.tile.v_begin, walk.p.v_dim, walk.p.aligned_v};
}

// state = what is left of it and (V ∘ left)ᵀ K of a strip of tokens. v: the strip's, as the operand
// B of 16 columns each. first_row: of the warp's rows of K.
template <class C>
__device__ void add_keys(typename C::Element const* tile_k, int strip, int first_row,
                         uint32_t const (&v)[C::kBlocks][4], float const* left,
                         WalkState<C>& state) {
  using Element = typename C::Element;
  int const own = strip * 16 + threadIdx.x % 4 * 2;  // tokens of this lane
  float2 const near = *reinterpret_cast<float2 const*>(&left[own]);
  float2 const far = *reinterpret_cast<float2 const*>(&left[own + 8]);
  // B of 16 columns is the operand A of its transpose, in another order.
  uint32_t a[C::kBlocks][4];
#pragma unroll
  for (int m = 0; m < C::kBlocks; ++m) {
    a[m][0] = decayed<Element>(v[m][0], near);
    a[m][1] = decayed<Element>(v[m][2], near);
    a[m][2] = decayed<Element>(v[m][1], far);
    a[m][3] = decayed<Element>(v[m][3], far);
  }
#pragma unroll
  for (int n = 0; n < C::kRows; n += 16) {
    uint32_t k[4];
    read_b_deep<C::kK>(tile_k, strip * 16, first_row + n, k);
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m) {
      multiply<Element>(a[m], k, state[m][n / 8], state[m][n / 8 + 1]);
    }
  }
}

template <class C>
__device__ void read_values(typename C::Element const* tile_v, int strip, int column,
                            uint32_t (&v)[C::kBlocks][4]) {
#pragma unroll
  for (int m = 0; m < C::kBlocks; ++m) {
    read_b_deep<C::kV>(tile_v, strip * 16, column * C::kOfWarp + m * 16, v[m]);
  }
}

template <class C>
__device__ void scale_state(WalkState<C>& state, float factor) {
#pragma unroll
  for (int m = 0; m < C::kBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < C::kRows / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        state[m][n][e] *= factor;
      }
    }
  }
}

}  // namespace flash::sm80::linear
