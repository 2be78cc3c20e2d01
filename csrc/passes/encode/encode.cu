// Codes of 8 bits (e4m3) of q, k and v, with a descale for each sequence and KV head, by which its
// largest number becomes the largest code; the mean of the keys may be taken off them first. Three
// launches: slices of rows are looked through, descales are chosen, numbers become codes. It only
// moves memory, and reads its inputs twice: a descale is known when all rows were seen.
#include <cutlass/numeric_types.h>

#include <algorithm>
#include <string_view>

#include "core/coded.h"
#include "core/dynamic_smem.h"
#include "core/softmax.h"
#include "core/varlen_rows.h"
#include "core/warp_lanes.h"
#include "launch/launch_kernel.h"
#include "passes/encode/launch.h"

namespace flash::encode {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChunk = 16;  // columns of a thread
constexpr float kLargestCode = 448.f, kLeastNormal = 1.17549435e-38f;

template <class Element>
struct alignas(16) Numbers : cutlass::Array<Element, kChunk> {};

// A slice of a sequence's rows of a head.
struct Slice {
  int tensor;
  int batch;
  int head;
  int number;         // in the sequence, which may have fewer
  int rows;           // of the sequence
  int64_t first_row;  // of the sequence, in varlen tensors
  int64_t part;       // where in `parts` its numbers are
};

FLASH_HD int slices_of(int rows) { return (rows + kEncodedSlice - 1) / kEncodedSlice; }

// Slice numbers of a head of a varlen tensor. A sequence's slices have those from row /
// kEncodedSlice + sequence on, row being its first: the host knows how many numbers there are, and
// not all stand for a slice.
FLASH_HD int varlen_slices(EncodeParams const& p, EncodedTensor const& t) {
  return t.rows / kEncodedSlice + p.batch;
}

FLASH_HD int64_t num_slices(EncodeParams const& p, EncodedTensor const& t) {
  return t.cu_rows ? int64_t(t.heads) * varlen_slices(p, t)
                   : int64_t(p.batch) * t.heads * slices_of(t.rows);
}

FLASH_HD VarlenRows varlen_rows(EncodeParams const& p, EncodedTensor const& t) {
  return {t.cu_rows, p.batch, t.rows};
}

// The slices of a sequence and head, among those of the tensor.
struct Slices {
  int64_t first;
  int count;
};

FLASH_HD Slices slices_of(EncodeParams const& p, EncodedTensor const& t, int batch, int head) {
  if (!t.cu_rows) {
    int const count = slices_of(t.rows);
    return {(int64_t(batch) * t.heads + head) * count, count};
  }
  RowRun const run = varlen_rows(p, t).run(batch);
  return {int64_t(head) * varlen_slices(p, t) + run.begin / kEncodedSlice + batch,
          slices_of(run.length)};
}

// Where a tensor's numbers in `parts` begin.
FLASH_HD int64_t first_part(EncodeParams const& p, int tensor) {
  int64_t first = 0;
  for (int i = 0; i < tensor; ++i) {
    first += num_slices(p, p.tensors[i]) * numbers_of_slice(p.tensors[i]);
  }
  return first;
}

// The last sequence whose slices begin at this number of a head, or before.
__device__ int sequence_of(VarlenRows const& rows, int number) {
  int sequence = 0;
  for (int end = rows.batch; end - sequence > 1;) {
    int const middle = sequence + (end - sequence) / 2;
    (rows.entry(middle) / kEncodedSlice + middle <= number ? sequence : end) = middle;
  }
  return sequence;
}

// Blocks are numbered by tensor, sequence, head and slice, or by tensor, varlen head and slice, in
// 32 bits, whose divisions are cheap.
__device__ Slice slice_of(EncodeParams const& p, uint32_t block) {
  int tensor = 0;
  while (block >= num_slices(p, p.tensors[tensor])) {
    block -= static_cast<uint32_t>(num_slices(p, p.tensors[tensor++]));
  }
  EncodedTensor const& t = p.tensors[tensor];
  int64_t const part = first_part(p, tensor) + int64_t(block) * numbers_of_slice(t);
  uint32_t const heads = t.heads, slices = t.cu_rows ? varlen_slices(p, t) : slices_of(t.rows);
  int const row = block / slices, number = block % slices;
  if (!t.cu_rows) {
    return {tensor, int(row / heads), int(row % heads), number, t.rows, 0, part};
  }
  VarlenRows const rows = varlen_rows(p, t);
  int const sequence = sequence_of(rows, number);
  RowRun const run = rows.run(sequence);
  return {tensor,     sequence,  row, number - run.begin / kEncodedSlice - sequence,
          run.length, run.begin, part};
}

// The rows of a slice that a thread has: every `apart`th. Its columns are the same in all of them.
struct Place {
  int column;
  int row;
  int apart;
  int end;

  __device__ Place(EncodedTensor const& t, Slice const& slice) {
    int const thread = threadIdx.x;
    int width = 1;  // threads of a row
    while (width * kChunk < t.columns) {
      width *= 2;
    }
    int const first = slice.number * kEncodedSlice;
    column = thread % width * kChunk;
    apart = kThreads / width;
    row = first + thread / width;
    end = column < t.columns ? std::min(first + kEncodedSlice, slice.rows) : 0;
  }
};

// Loads 16 bytes at a time.
template <class T>
__device__ Numbers<T> numbers_from(T const* from) {
  constexpr int kWords = sizeof(Numbers<T>) / sizeof(uint4);
  Numbers<T> numbers;
  auto const* const words = reinterpret_cast<uint4 const*>(from);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    reinterpret_cast<uint4*>(&numbers)[i] = words[i];
  }
  return numbers;
}

// Calls use(row, numbers) for each row of a thread. Loads of kAtOnce rows are under way together,
// which the compiler cannot arrange where `use` writes memory.
template <class Element, int kAtOnce, class Use>
__device__ void for_rows(EncodedTensor const& t, Slice const& s, Place const& at, Use use) {
  auto const* const x =
      static_cast<Element const*>(t.x.ptr) + t.x.offset(s.batch, s.first_row, s.head);
#pragma unroll 1
  for (int first = at.row; first < at.end; first += kAtOnce * at.apart) {
    Numbers<Element> numbers[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const row = std::min(first + i * at.apart, at.end - 1);
      numbers[i] = numbers_from(x + row * t.x.row_stride + at.column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const row = first + i * at.apart;
      if (row < at.end) {
        use(row, numbers[i]);
      }
    }
  }
}

__device__ inline bool is_finite(float x) { return fabsf(x) < INFINITY; }

__device__ inline float finite_size(float x) { return is_finite(x) ? fabsf(x) : 0.f; }

template <class Op>
__device__ float over_warp(float x, Op op, int apart = 1) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    if (distance >= apart) {
      x = op(x, __shfl_xor_sync(WarpLanes::kAll, x, distance));
    }
  }
  return x;
}

struct Min {
  __device__ float operator()(float a, float b) const { return fminf(a, b); }
};

// The largest number of all threads, in each of them.
__device__ float largest_of_block(float x, float* shared) {
  int const warp = threadIdx.x / 32;
  x = over_warp(x, Max{});
  if (threadIdx.x % 32 == 0) {
    shared[warp] = x;
  }
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) {
    x = fmaxf(x, shared[i]);
  }
  return x;
}

// The larger ones of two pairs of 16 bits, without signs.
__device__ inline uint32_t larger_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vmaxu2(a, b);
#else
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
#endif
}

// The largest finite size among a thread's numbers, which have exponents of all ones otherwise.
template <class Element>
__device__ float largest_finite(EncodedTensor const& t, Slice const& s, Place const& at) {
  float largest = 0.f;
  for_rows<Element, 1>(t, s, at, [&](int, Numbers<Element> const& x) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      largest = fmaxf(largest, finite_size(float(x[i])));
    }
  });
  return largest;
}

// Sizes compare as integers, two in an instruction. If the largest is not finite, the thread reads
// again and skips such numbers.
template <class Element>
__device__ void look_at_sizes(EncodedTensor const& t, Slice const& s, float* part, float* shared) {
  Place const at(t, s);
  uint32_t pair = 0;
  for_rows<Element, 4>(t, s, at, [&](int, Numbers<Element> const& x) {
    auto const* const words = reinterpret_cast<uint32_t const*>(&x);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      pair = larger_halves(pair, words[i] & 0x7fff7fffu);
    }
  });
  auto const bits = static_cast<uint16_t>(larger_halves(pair, pair >> 16));
  float largest = float(Element::bitcast(bits));
  if (largest != finite_size(largest)) {
    largest = largest_finite<Element>(t, s, at);
  }
  largest = largest_of_block(largest, shared);
  if (threadIdx.x == 0) {
    *part = largest;
  }
}

// For each column: the sum, the least and the largest number. If its numbers are not all finite,
// neither is the sum, and the column does not count (centre_columns).
template <class Element>
__device__ void look_at_columns(EncodedTensor const& t, Slice const& s, float* part,
                                float* shared) {
  Place const at(t, s);
  Numbers<float> sum, least, largest;
  sum.fill(0.f), least.fill(INFINITY), largest.fill(-INFINITY);
  for_rows<Element, 2>(t, s, at, [&](int, Numbers<Element> const& numbers) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float const x = float(numbers[i]);
      sum[i] += x;
      least[i] = fminf(least[i], x);
      largest[i] = fmaxf(largest[i], x);
    }
  });
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = kThreads / at.apart;
  float* const own = shared + warp * 3 * kMostEncodedColumns + at.column;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float const of_warp[3] = {over_warp(sum[i], Sum{}, width), over_warp(least[i], Min{}, width),
                              over_warp(largest[i], Max{}, width)};
    for (int what = 0; what < 3 && lane < width; ++what) {
      own[what * kMostEncodedColumns + i] = of_warp[what];
    }
  }
  __syncthreads();
  for (int column = threadIdx.x; column < t.columns; column += kThreads) {
    float of_slice[3] = {0.f, INFINITY, -INFINITY};
    for (int i = 0; i < kWarps; ++i) {
      float const* const of_warp = shared + i * 3 * kMostEncodedColumns + column;
      of_slice[0] += of_warp[0];
      of_slice[1] = fminf(of_slice[1], of_warp[kMostEncodedColumns]);
      of_slice[2] = fmaxf(of_slice[2], of_warp[2 * kMostEncodedColumns]);
    }
    for (int what = 0; what < 3; ++what) {
      part[what * t.columns + column] = of_slice[what];
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) look_kernel(__grid_constant__ EncodeParams const p) {
  Slice const s = slice_of(p, blockIdx.x);
  EncodedTensor const& t = p.tensors[s.tensor];
  auto* const shared = reinterpret_cast<float*>(dynamic_smem());
  if (t.mean) {
    look_at_columns<Element>(t, s, p.parts + s.part, shared);
  } else {
    look_at_sizes<Element>(t, s, p.parts + s.part, shared);
  }
}

// The largest size of a head's numbers less their mean, of the columns that the thread has, and the
// mean of these. A column whose mean is not finite has no finite number then.
__device__ float centre_columns(EncodeParams const& p, EncodedTensor const& t, int64_t head,
                                float const* parts) {
  int const slices = slices_of(t.rows);
  float largest = 0.f;
  for (int column = threadIdx.x; column < t.columns; column += kThreads) {
    float sum = 0.f, low = INFINITY, high = -INFINITY;
    for (int i = 0; i < slices; ++i) {
      float const* const part = parts + (head * slices + i) * 3 * t.columns + column;
      sum += part[0];
      low = fminf(low, part[t.columns]);
      high = fmaxf(high, part[2 * t.columns]);
    }
    float const mean = sum / static_cast<float>(t.rows);
    t.mean[head * t.columns + column] = mean;
    largest = fmaxf(largest, fmaxf(finite_size(high - mean), finite_size(low - mean)));
  }
  return largest;
}

// CTA: tensor, sequence and KV head.
__global__ void __launch_bounds__(kThreads) choose_kernel(__grid_constant__ EncodeParams const p) {
  int const of_tensor = p.batch * p.heads_kv, tensor = int(blockIdx.x) / of_tensor;
  int const group_of = int(blockIdx.x) % of_tensor;  // number of the sequence's KV head
  EncodedTensor const& t = p.tensors[tensor];
  float const* const parts = p.parts + first_part(p, tensor);
  float largest = 0.f;
  if (t.mean) {
    largest = centre_columns(p, t, group_of, parts);
  } else {
    int const batch = group_of / p.heads_kv, group = t.heads / p.heads_kv;
    int const first_head = group_of % p.heads_kv * group;
    int const slices = slices_of(p, t, batch, first_head).count;
    for (int i = threadIdx.x; i < group * slices; i += kThreads) {
      int64_t const first = slices_of(p, t, batch, first_head + i / slices).first;
      largest = fmaxf(largest, parts[first + i % slices]);
    }
  }
  largest = largest_of_block(largest, reinterpret_cast<float*>(dynamic_smem()));
  if (threadIdx.x == 0) {
    t.descales[group_of] = largest == 0.f ? 1.f : fmaxf(largest / kLargestCode, kLeastNormal);
  }
}

// Codes of x / descale. A quotient is rounded as a division does it (Markstein 1990), in three
// instructions instead of a call, but for numbers that are not finite: nothing is left of these.
__device__ inline uint4 codes_of(Numbers<float> const& x, float descale, float reciprocal) {
  float quotients[kChunk];
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float const near = x[i] * reciprocal, rest = fmaf(-near, descale, x[i]);
    quotients[i] = fmaf(rest, reciprocal, near);
    finite = finite && rest == rest;
  }
  uint32_t words[kChunk / 4] = {};
  if (!finite) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float const near = x[i] * reciprocal;
      quotients[i] = is_finite(near) ? quotients[i] : near;
    }
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) {
      words[i] = nan_codes(quotients + 4 * i);
    }
  }
#pragma unroll
  for (int i = 0; i < kChunk / 4; ++i) {
    words[i] |= four_codes(quotients + 4 * i);
  }
  return {words[0], words[1], words[2], words[3]};
}

template <class Element>
__global__ void __launch_bounds__(kThreads) encode_kernel(__grid_constant__ EncodeParams const p) {
  Slice const s = slice_of(p, blockIdx.x);
  EncodedTensor const& t = p.tensors[s.tensor];
  Place const at(t, s);
  float const descale = t.descales[s.batch * p.heads_kv + s.head / (t.heads / p.heads_kv)];
  float const reciprocal = 1.f / descale;
  Numbers<float> mean;
  mean.fill(0.f);
  if (t.mean && at.row < at.end) {
    mean = numbers_from(t.mean + (int64_t(s.batch) * t.heads + s.head) * t.columns + at.column);
  }
  auto* const codes =
      static_cast<char*>(t.codes.ptr) + t.codes.offset(s.batch, s.first_row, s.head);
  for_rows<Element, 2>(t, s, at, [&](int row, Numbers<Element> const& numbers) {
    Numbers<float> x;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      x[i] = float(numbers[i]) - mean[i];
    }
    *reinterpret_cast<uint4*>(codes + row * t.codes.row_stride + at.column) =
        codes_of(x, descale, reciprocal);
  });
}

int64_t num_slices(EncodeParams const& p) {
  int64_t slices = 0;
  for (int i = 0; i < p.count; ++i) {
    slices += num_slices(p, p.tensors[i]);
  }
  return slices;
}

template <class Element>
void launch_of(EncodeParams const& p, LaunchContext const& launch) {
  constexpr int kSmemBytes = kWarps * 3 * kMostEncodedColumns * sizeof(float);
  launch_kernel<look_kernel<Element>>(launch, {num_slices(p), kThreads, kSmemBytes}, p);
  launch_kernel<choose_kernel>(launch, {int64_t(p.count) * p.batch * p.heads_kv, kThreads, 64}, p);
  launch_kernel<encode_kernel<Element>>(launch, {num_slices(p), kThreads, 0}, p);
}

}  // namespace flash::encode

int64_t flash::numbers_of_parts(EncodeParams const& params) {
  return encode::first_part(params, params.count);
}

void flash::launch_encode(EncodeParams const& params, char const* dtype,
                          LaunchContext const& launch) {
  auto const launch_it = std::string_view(dtype) == "bf16" ? encode::launch_of<cutlass::bfloat16_t>
                                                           : encode::launch_of<cutlass::half_t>;
  launch_it(params, launch);
}
