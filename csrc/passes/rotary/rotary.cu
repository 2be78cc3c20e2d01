// Rotary embedding as a layer: one launch rotates q and k by their positions, and copies what is
// packed with them. It only moves memory: dims are numbers, and nothing of a tile's shape matters.
//
// A head is cut into runs of neighbouring channels, 16 bytes each. An item is two runs, those with
// the same place in both halves of rotary_dim: half-split pairs lie across them, interleaved ones
// within them, and a warp reads and writes whole sectors in either layout.
#include "passes/rotary/launch.h"

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <bit>
#include <string_view>
#include <type_traits>

#include "core/rotary.h"
#include "core/varlen_rows.h"
#include "launch/launch_kernel.h"

namespace flash::rotary {

constexpr int kThreads = 256;
// Heads of a thread: the angles are read once for them, and all their loads are under way together.
constexpr int kHeads = 4;

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Run {
  T element[kCount];
};

// A run of a head as it is loaded and kept: in whole registers, until it is rotated.
template <class Element, int kRun>
using Bits = std::conditional_t<kRun == 1, Element, uint4>;

// How the work on one token is shared by threads: by item, then by set of heads.
struct Shares {
  FastDiv items;      // of a head
  FastDiv per_token;  // items * sets of heads, of all parts
  FastDiv seqlen;
  int tokens;  // of a CTA
};

FLASH_HD int num_head_sets(RotaryHeads const& part) { return (part.heads + kHeads - 1) / kHeads; }

// Items of a head, of two runs each; if an odd number of runs is not rotated, the last item has
// one.
FLASH_HD int num_items(RotaryParams const& p, int run) {
  return p.in_place ? p.half / run : (p.head_dim / run + 1) / 2;
}

// An item of a head: where its runs start, and what happens to them.
struct Item {
  int first;
  int second;  // may lie outside of the head; then there is none
  bool rotates;
};

template <int kRun>
FLASH_HD Item item_of(RotaryParams const& p, bool rotates, int index) {
  int const half = rotates ? p.half : 0, rotating = half / kRun;
  if (index >= rotating) {
    int const copied = ((p.head_dim - 2 * half) / kRun + 1) / 2;
    int const first = 2 * half + (index - rotating) * kRun;
    return {first, first + copied * kRun, false};
  }
  if (kRun == 1 && p.interleaved) {
    return {2 * index, 2 * index + 1, true};
  }
  return {index * kRun, half + index * kRun, true};
}

// The row of the tables for a token: inside the tables whatever offsets and cu_seqlens hold, which
// no code has checked. A token of no sequence is at 0.
FLASH_HD int64_t position_of(RotaryPlaces const& at, int batch, int64_t row) {
  int sequence = batch;
  int64_t position = row;
  if (at.cu_seqlens) {
    VarlenRows const rows{at.cu_seqlens, at.batch, at.seqlen};
    sequence = rows.sequence_of(int(row));
    if (sequence == at.batch) {
      return 0;
    }
    position -= rows.entry(sequence);
  }
  position += at.offsets ? at.offsets[sequence] : at.offset;
  int64_t const last = at.positions - 1;
  return position < 0 ? 0 : position < last ? position : last;
}

template <int kRun>
struct Angles {
  float cos[kRun];
  float sin[kRun];
};

template <class Element, int kCount>
__device__ void read(void const* table, bool wide, int64_t at, float* to) {
  auto const read_as = [&]<class T>(T const* from) {
    auto const run = *reinterpret_cast<Run<T, kCount> const*>(from + at);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = static_cast<float>(run.element[i]);
    }
  };
  if (wide) {
    read_as(static_cast<float const*>(table));
  } else {
    read_as(static_cast<Element const*>(table));
  }
}

// Angles of an item's pairs: pairs across its runs in the order of the runs, or pairs within the
// first run and then those within the second.
template <class Element, int kRun>
__device__ Angles<kRun> read_angles(RotaryParams const& p, RotaryHeads const& part, Item item,
                                    int64_t cos, int64_t sin) {
  Angles<kRun> angles;
  if constexpr (kRun == 1) {
    int const pair = p.interleaved ? item.first / 2 : item.first;
    read<Element, 1>(part.cos.ptr, p.wide_tables, cos + pair, angles.cos);
    read<Element, 1>(part.sin.ptr, p.wide_tables, sin + pair, angles.sin);
  } else {
    constexpr int kPiece = kRun / 2;
    int const pairs[2] = {p.interleaved ? item.first / 2 : item.first,
                          p.interleaved ? item.second / 2 : item.first + kPiece};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      read<Element, kPiece>(part.cos.ptr, p.wide_tables, cos + pairs[i], angles.cos + i * kPiece);
      read<Element, kPiece>(part.sin.ptr, p.wide_tables, sin + pairs[i], angles.sin + i * kPiece);
    }
  }
  if (p.conjugate) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      angles.sin[i] = -angles.sin[i];
    }
  }
  return angles;
}

template <class Element>
__device__ void rotate(Element& first, Element& second, float cos, float sin) {
  Pair const rotated =
      rotate_pair({static_cast<float>(first), static_cast<float>(second)}, cos, sin);
  first = Element(rotated.first);
  second = Element(rotated.second);
}

template <class Element, int kRun>
__device__ void rotate_runs(bool interleaved, Angles<kRun> const& at, Bits<Element, kRun>& first,
                            Bits<Element, kRun>& second) {
  auto a = std::bit_cast<Run<Element, kRun>>(first), b = std::bit_cast<Run<Element, kRun>>(second);
  if (kRun == 1 || !interleaved) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      rotate(a.element[i], b.element[i], at.cos[i], at.sin[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; i += 2) {
      int const pair = i / 2, other = (kRun + i) / 2;
      rotate(a.element[i], a.element[i + 1], at.cos[pair], at.sin[pair]);
      rotate(b.element[i], b.element[i + 1], at.cos[other], at.sin[other]);
    }
  }
  first = std::bit_cast<Bits<Element, kRun>>(a);
  second = std::bit_cast<Bits<Element, kRun>>(b);
}

// Rotates or copies one item of up to kHeads heads of a token.
template <class Element, int kRun>
__device__ void do_share(RotaryParams const& p, RotaryHeads const& part, int head_set, Item item,
                         int batch, int64_t row) {
  int const head = head_set * kHeads, heads = part.heads - head;  // from this one on
  auto const* const x = static_cast<Element const*>(part.x.ptr) + part.x.offset(batch, row, head);
  auto* const out = static_cast<Element*>(part.out.ptr) + part.out.offset(batch, row, head);
  bool const both = item.second < p.head_dim;
  using Elements = Bits<Element, kRun>;
  Elements a[kHeads], b[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < heads) {
      a[h] = *reinterpret_cast<Elements const*>(x + h * part.x.head_stride + item.first);
      if (both) {
        b[h] = *reinterpret_cast<Elements const*>(x + h * part.x.head_stride + item.second);
      }
    }
  }
  if (item.rotates) {
    int64_t const position = position_of(p.places, batch, row);
    auto const angles = read_angles<Element, kRun>(
        p, part, item, part.cos.offset(batch, position, 0), part.sin.offset(batch, position, 0));
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      rotate_runs<Element, kRun>(p.interleaved, angles, a[h], b[h]);
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < heads) {
      *reinterpret_cast<Elements*>(out + h * part.out.head_stride + item.first) = a[h];
      if (both) {
        *reinterpret_cast<Elements*>(out + h * part.out.head_stride + item.second) = b[h];
      }
    }
  }
}

template <class Element, int kRun>
__global__ void __launch_bounds__(kThreads, 3)
    rotary_kernel(__grid_constant__ RotaryParams const p, __grid_constant__ Shares const shares) {
  int64_t const first = int64_t(blockIdx.x) * shares.tokens;
  int const per_token = int(shares.per_token.divisor);
  for (int i = threadIdx.x; i < shares.tokens * per_token; i += kThreads) {
    int const nth = shares.per_token.quotient(i);
    int64_t const token = first + nth;
    if (token >= p.tokens) {
      return;
    }
    int const share = shares.per_token.remainder(i, nth);
    int head_set = shares.items.quotient(share);
    int const index = shares.items.remainder(share, head_set);
    int part = 0;
    for (; head_set >= num_head_sets(p.parts[part]); ++part) {
      head_set -= num_head_sets(p.parts[part]);
    }
    bool const rotates = p.parts[part].cos.ptr;
    int const batch = p.places.cu_seqlens ? 0 : shares.seqlen.quotient(int(token));
    do_share<Element, kRun>(p, p.parts[part], head_set, item_of<kRun>(p, rotates, index), batch,
                            token - int64_t(batch) * p.places.seqlen);
  }
}

template <class T>
bool aligned(TensorView<T> const& x, int64_t elements, int64_t bytes_each) {
  return reinterpret_cast<uintptr_t>(x.ptr) % (elements * bytes_each) == 0 &&
         x.batch_stride % elements == 0 && x.row_stride % elements == 0 &&
         x.head_stride % elements == 0;
}

// Whether all heads are whole runs of `run` elements that begin where such runs may.
bool takes_runs(RotaryParams const& p, int run, int64_t element_bytes) {
  int64_t const table_bytes = p.wide_tables ? sizeof(float) : element_bytes;
  return p.half % run == 0 && (p.in_place || p.head_dim % run == 0) &&
         std::all_of(std::begin(p.parts), std::end(p.parts), [&](RotaryHeads const& part) {
           return aligned(part.x, run, element_bytes) && aligned(part.out, run, element_bytes) &&
                  aligned(part.cos, run / 2, table_bytes) &&
                  aligned(part.sin, run / 2, table_bytes);
         });
}

template <class Element, int kRun>
void launch_runs(RotaryParams const& p, LaunchContext const& launch) {
  int const items = num_items(p, kRun);
  int head_sets = 0;
  for (RotaryHeads const& part : p.parts) {
    head_sets += num_head_sets(part);
  }
  if (items * head_sets == 0) {
    return;
  }
  int const tokens = std::max(1, kThreads / (items * head_sets));
  Shares const shares{FastDiv(items), FastDiv(items * head_sets),
                      FastDiv(std::max(1, p.places.seqlen)), tokens};
  launch_kernel<rotary_kernel<Element, kRun>>(
      launch, {(p.tokens + tokens - 1) / tokens, kThreads, 0}, p, shares);
}

template <class Element>
void launch_of(RotaryParams const& p, LaunchContext const& launch) {
  constexpr int kRun = 16 / sizeof(Element);
  (takes_runs(p, kRun, sizeof(Element)) ? launch_runs<Element, kRun>
                                        : launch_runs<Element, 1>)(p, launch);
}

}  // namespace flash::rotary

void flash::launch_rotary(RotaryParams const& params, char const* dtype,
                          LaunchContext const& launch) {
  using namespace rotary;
  std::string_view const name(dtype);
  auto const launch_it = name == "bf16"   ? launch_of<cutlass::bfloat16_t>
                         : name == "fp16" ? launch_of<cutlass::half_t>
                                          : launch_of<float>;
  launch_it(params, launch);
}
