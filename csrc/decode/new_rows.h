// Writes a call's new rows in the launch that reads them, so that a step of generation is one
// launch. Queries are rotated on their way to shared memory. New keys and values go to the cache:
// each CTA writes the ones that it reads, so that no CTA waits for another, and CTAs that read the
// same rows write the same values. The first piece of each KV head writes rows that no query sees.
#pragma once

#include "core/coded.h"
#include "core/swap_halves.h"
#include "decode/key_ring.h"

namespace flash::decode {

// Pairs to rotate, or as many neighbours that are copied. Code that runs once takes the time, so
// both layouts, and queries and keys, share it: interleaved pairs are taken apart before the
// rotation and put together after it.
template <class Element>
struct RowPart {
  static constexpr int kPairs = kPairsAtOnce, kColumns = 2 * kPairs;
  using Chunk = cutlass::AlignedArray<Element, kPairs>;

  int first;  // column of x
  int second;
  Chunk x;
  Chunk y;
  Chunk cos;
  Chunk sin;
  float scale;  // of codes

  __device__ void rotate(bool interleaved) {
    if (interleaved) {
      take_apart();
    }
    cutlass::NumericArrayConverter<float, Element, kPairs> widen;
    auto const a = widen(x), b = widen(y), c = widen(cos), s = widen(sin);
    cutlass::Array<float, kPairs> rotated_a, rotated_b;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      rotated_a[i] = a[i] * c[i] - b[i] * s[i];
      rotated_b[i] = b[i] * c[i] + a[i] * s[i];
    }
    cutlass::NumericArrayConverter<Element, float, kPairs> round;
    static_cast<cutlass::Array<Element, kPairs>&>(x) = round(rotated_a);
    static_cast<cutlass::Array<Element, kPairs>&>(y) = round(rotated_b);
    if (interleaved) {
      put_together();
    }
  }

 private:
  using Words = uint32_t (&)[2];

  // From two pairs in x and two in y: the first elements to x, the second ones to y.
  __device__ void take_apart() {
    auto& u = reinterpret_cast<Words>(x);
    auto& v = reinterpret_cast<Words>(y);
    swap_halves(u[0], u[1]);
    swap_halves(v[0], v[1]);
    exchange(u[1], v[0]);
  }

  __device__ void put_together() {
    auto& u = reinterpret_cast<Words>(x);
    auto& v = reinterpret_cast<Words>(y);
    exchange(u[1], v[0]);
    swap_halves(u[0], u[1]);
    swap_halves(v[0], v[1]);
  }

  static __device__ void exchange(uint32_t& a, uint32_t& b) {
    uint32_t const old = a;
    a = b;
    b = old;
  }
};

// Which part of the CTA's rows a thread has.
struct PartPlace {
  enum Kind { Query, Key, Value } kind;
  int row;   // of the tile, or number of the new key
  int part;  // of the row
};

// The rows of one CTA, in parts that its threads share: queries of its tile, then new keys
// [begin, begin + keys) of its sequence and KV head, then their values.
template <class Config>
struct BlockRows {
  using Element = typename Config::Element;
  using Cached = typename Config::Cached;
  using Part = RowPart<Element>;
  static constexpr int kParts = cute::max(Config::kHeadDim, Config::kHeadDimV) / Part::kColumns;

  DecodeParams const& p;
  DecodeWork<Config> const& work;
  Element* tile;  // queries, Config::kQueryStride apart
  int before;     // keys that are there before
  int begin;
  int keys;
  int stage;  // of the ring: this warp's first step that reads new keys

  __device__ BlockRows(DecodeParams const& p_, DecodeWork<Config> const& work_, Element* tile_,
                       int warp)
      : p(p_),
        work(work_),
        tile(tile_),
        before(p.fwd.seqlens.used_k[work.tile.sequence]),
        keys(0),
        stage(Config::kStages) {
    Seqlens const& s = p.fwd.seqlens;
    // The first new key, counted from the piece's first key
    int const first = min(max(before, -1), s.seqlen_k) - work.tile.info.leftpad - work.begin;
    bool const is_first = work.has_first_keys && work.tile.first_row == 0;
    begin = is_first ? 0 : max(-first, 0);
    int const end = min(work.end - work.begin - first, s.new_k);
    if (begin < end) {
      keys = end - begin;
      stage = first_stage(first + begin, first + end, warp);
    }
  }

  __device__ int parts() const { return (work.tile.rows + 2 * keys) * kParts; }

  __device__ PartPlace place(int index) const {
    auto const row = static_cast<int>(unsigned(index) / kParts);
    int const part = index - row * kParts, key = row - work.tile.rows;
    if (key < 0) {
      return {PartPlace::Query, row, part};
    }
    bool const is_key = key < keys;
    return {is_key ? PartPlace::Key : PartPlace::Value, begin + key - (is_key ? 0 : keys), part};
  }

  // Starts the loads; the thread waits for them in `store`.
  __device__ Part load(PartPlace const& at) const {
    Rotary const& rotary = p.rows.rotary;
    constexpr int kPairs = Part::kPairs;
    bool const is_rotated = rotates(at);
    bool const is_split = is_rotated && !rotary.interleaved;
    Part part;
    part.first = (is_split ? kPairs : Part::kColumns) * at.part;
    part.second = part.first + (is_split ? rotary.rotary_dim / 2 : kPairs);
    int row = at.row, head = work.tile.head_kv;
    auto position = uint32_t(max(before, 0)) + row;  // may be any number
    if (at.kind == PartPlace::Query) {
      QueryRow const query = work.tile.row(p.group, row);
      row = query.query;
      head = query.head;
      position = uint32_t(max(before, 0)) + (rotary.advance_q ? row : 0);
    }
    TensorView<const void> const& from = at.kind == PartPlace::Query ? p.fwd.q
                                         : at.kind == PartPlace::Key ? p.rows.k
                                                                     : p.rows.v;
    Element const* const source =
        static_cast<Element const*>(from.ptr) + from.offset(work.tile.sequence, row, head);
    bool const exists = at.part * Part::kColumns < columns(at.kind);
    part.x = exists ? chunk(source + part.first) : Chunk{};
    part.y = exists ? chunk(source + part.second) : Chunk{};
    if constexpr (Config::kCodes) {
      part.scale = at.kind == PartPlace::Query ? 1.f : scale(at);
    }
    if (is_rotated) {
      // A position beyond the tables is an error that cannot be reported from here; the clamp
      // avoids a fault at least.
      int64_t const angles = min(position, uint32_t(rotary.positions) - 1);
      auto const* const cos = static_cast<Element const*>(rotary.cos);
      auto const* const sin = static_cast<Element const*>(rotary.sin);
      part.cos = chunk(cos + angles * rotary.cos_stride + at.part * kPairs);
      part.sin = chunk(sin + angles * rotary.sin_stride + at.part * kPairs);
    }
    return part;
  }

  __device__ void store(PartPlace const& at, Part& part) const {
    if (rotates(at)) {
      part.rotate(p.rows.rotary.interleaved);
    }
    if (at.kind == PartPlace::Query) {
      // The tile gets zeros in the columns beyond the head's, where K is zero as well.
      store(tile + at.row * Config::kQueryStride, at, part, part.x, part.y, Config::kHeadDim);
    } else if (Cached* const to = target(at)) {
      if constexpr (Config::kCodes) {
        store_to_cache(to, at, part, coded<Part::kPairs>(part.x, part.scale),
                       coded<Part::kPairs>(part.y, part.scale));
      } else {
        store_to_cache(to, at, part, part.x, part.y);
      }
    }
  }

 private:
  using Chunk = typename Part::Chunk;

  // The stage of the warp's step that has some of the keys [begin, end). They are so few that they
  // lie in one step, or in two steps of two warps.
  static __device__ int first_stage(int begin, int end, int warp) {
    constexpr int kN = Config::kBlockN, kWarps = Config::kWarps;
    static_assert(kMostNewKeys <= kN);
    int const from = begin >= 0 ? begin / kN : 0;  // negative ones are in no step
    int const step = from + ((warp - from) & (kWarps - 1));
    return step * kN < end ? min(step / kWarps, Config::kStages) : Config::kStages;
  }

  __device__ bool rotates(PartPlace const& at) const {
    Rotary const& rotary = p.rows.rotary;
    return rotary.cos && at.kind != PartPlace::Value &&
           at.part * Part::kColumns < rotary.rotary_dim;
  }

  __device__ int columns(PartPlace::Kind kind) const {
    return kind == PartPlace::Value ? p.fwd.head_dim_v : p.fwd.head_dim;
  }

  static __device__ Chunk chunk(Element const* source) {
    return *reinterpret_cast<Chunk const*>(source);
  }

  // `from` of Numbers, kPairs of them, and as many that belong to part.second.
  template <class Number, class Numbers>
  static __device__ void store(Number* row, PartPlace const& at, Part const& part,
                               Numbers const& first, Numbers const& second, int end) {
    using Aligned = cutlass::AlignedArray<Number, Part::kPairs>;
    if (at.part * Part::kColumns < end) {
      static_cast<Numbers&>(*reinterpret_cast<Aligned*>(row + part.first)) = first;
      static_cast<Numbers&>(*reinterpret_cast<Aligned*>(row + part.second)) = second;
    }
  }

  template <class Numbers>
  __device__ void store_to_cache(Cached* row, PartPlace const& at, Part const& part,
                                 Numbers const& first, Numbers const& second) const {
    if constexpr (Config::kScores == ScoreLevel::Full) {
      if (p.rows.odd) [[unlikely]] {
        int const end = at.kind == PartPlace::Key ? p.rows.columns_k : p.rows.columns_v;
        store_each(row, part.first, first, end);
        store_each(row, part.second, second, end);
        return;
      }
    }
    store(row, at, part, first, second, columns(at.kind));
  }

  // Stores columns [col, col + kPairs) of a row with columns [0, end) that is not whole chunks.
  template <class Numbers>
  static __device__ void store_each(Cached* row, int col, Numbers const& from, int end) {
#pragma unroll
    for (int i = 0; i < Part::kPairs; ++i) {
      if (col + i < end) {
        row[col + i] = from[i];
      }
    }
  }

  // The slot of a new key in the cache; without a page if there is none for it.
  __device__ PageSlot slot(PartPlace const& at) const {
    bool const fits = before >= 0 && before < p.fwd.seqlens.seqlen_k - at.row;
    return fits ? work.pages.slot(before + at.row) : PageSlot{PageSlot::kNoPage, 0};
  }

  // The cache's row of a new key; null if it has no place.
  __device__ Cached* target(PartPlace const& at) const {
    PageSlot const to = slot(at);
    TensorView<void> const& cache = at.kind == PartPlace::Key ? p.rows.k_cache : p.rows.v_cache;
    return work.pages.exists(to)
               ? static_cast<Cached*>(cache.ptr) + cache.offset(to.page, to.row, work.tile.head_kv)
               : nullptr;
  }

  __device__ float scale(PartPlace const& at) const {
    Descale const& scale = at.kind == PartPlace::Key ? p.fwd.codes.k : p.fwd.codes.v;
    PageSlot const of = slot(at);
    float const head = scale.of_head(work.tile.sequence, work.tile.head_kv);
    return scale.of_rows && work.pages.exists(of)
               ? head * *scale.of_row(of.page, of.row, work.tile.head_kv)
               : head;
  }
};

// Called by all threads. Writes the CTA's rows while the ring's first keys are on their way. A warp
// whose first steps read new keys loads those steps afterwards. The loop keeps a single copy of
// each part of the code, because an SM fetches code that runs once at about 6 ns an instruction.
template <class Config>
__device__ void fill_with_new_rows(BlockRows<Config> const& rows, KeyRing<Config>& ring) {
  constexpr int kStages = Config::kStages, kThreads = Config::kThreads;
  int const thread = threadIdx.x, parts = rows.parts();
  int stage = 0, end = rows.stage;
  bool are_written = false;
#pragma unroll 1
  for (int first = 0; !are_written || stage < kStages; first += kThreads) {
    bool const has = first + thread < parts;
    PartPlace const at = rows.place(first + thread);
    typename BlockRows<Config>::Part part;
    if (has) {
      part = rows.load(at);
    }
    ring.fill(stage, end);
    if (has) {
      rows.store(at, part);
    }
    if (!are_written && first + kThreads >= parts) {
      are_written = true;
      end = kStages;
      __syncthreads();
    }
  }
}

}  // namespace flash::decode
