// One token of each sequence: S = e^g S + k vᵀ in place, and o = scale Sᵀ q. The states are nearly
// all that moves, so a thread has many runs of 16 bytes of them under way, and no tile is staged.
#pragma once

#include <cmath>

#include "core/dynamic_smem.h"
#include "linear/step.h"

namespace flash::sm80::linear {

using flash::linear::kStepLoads;
using flash::linear::StepGrid;
using flash::linear::StepParams;

// Neighbouring numbers of a state.
template <int kRun>
struct alignas(sizeof(float) * kRun) StateRun {
  float x[kRun];
};

// Computed here, once. From what a launch is given the compiler derives addresses anew at each use
// that is conditional: four fifths of the instructions before the loads were such. An offset,
// because of a pointer it would no longer know that it is one to global memory.
__device__ inline int64_t settled(int64_t offset) {
  asm volatile("" : "+l"(offset));
  return offset;
}

struct StateTile {
  int row;
  int head;
  int v_begin;
  bool exists;
};

__device__ inline StateTile state_tile(StepGrid const& grid, int in_cta) {
  int const number = blockIdx.x * grid.tiles_of_cta + in_cta;
  int const state = grid.tiles.quotient(number), row = grid.heads.quotient(state);
  return {row, grid.heads.remainder(state, row),
          grid.tiles.remainder(number, state) << grid.columns_log2,
          in_cta < grid.tiles_of_cta && number < grid.all_tiles};
}

// The number of the tile's state; -1 where the row has none: it is padding, or names one that does
// not exist.
__device__ inline int slot_of(StepParams const& p, StateTile const& tile) {
  if (!tile.exists) {
    return -1;
  }
  int const slot = p.slots ? p.slots[tile.row] : tile.row;
  return slot < p.state_count ? slot : -1;
}

template <class Element>
struct StepInputs {
  Element const* q;
  Element const* k;
  Element const* v;  // from the tile's first column on
  char const* gate;  // of k = 0

  __device__ StepInputs(StepParams const& p, StepGrid const& grid, StateTile const& tile) {
    int const row = tile.row, head = tile.head, shared = grid.group.quotient(head);
    int64_t const log = row * p.gate.row_stride + head * p.gate.head_stride;
    int const bytes = p.gate.fp32 ? sizeof(float) : sizeof(Element);
    q = static_cast<Element const*>(p.q.ptr) + settled(p.q.offset(0, row, shared));
    k = static_cast<Element const*>(p.k.ptr) + settled(p.k.offset(0, row, shared));
    v = static_cast<Element const*>(p.v.ptr) + settled(p.v.offset(0, row, head) + tile.v_begin);
    gate = static_cast<char const*>(p.gate.ptr) + settled(log * bytes);
  }
};

// What some rows of the state, a step apart, meet along K.
template <class Element, int kCount>
struct StepKeys {
  Element key[kCount];
  Element query[kCount];
  float decay[kCount];

  // To be called when the state was asked for: here the decays are waited for.
  __device__ void read(StepParams const& p, StepInputs<Element> const& in, int first, int step) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (int const k = first + n * step; k < p.k_dim) {
        key[n] = in.k[k];
        query[n] = in.q[k];
      }
      decay[n] = 1.f;
    }
    if (p.gate.ptr) {
      if (p.gate.fp32) {
        read_decays(p, reinterpret_cast<float const*>(in.gate), first, step);
      } else {
        read_decays(p, reinterpret_cast<Element const*>(in.gate), first, step);
      }
    }
  }

  // A NaN or infinity in the state stays one below a decay of 0, as in a product of tensors.
  template <class Gate>
  __device__ void read_decays(StepParams const& p, Gate const* gate, int first, int step) {
    if (p.gate.k_stride == 0) {
      float const of_head = expf(static_cast<float>(*gate));
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        decay[n] = of_head;
      }
      return;
    }
    Gate log[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      int const k = first + n * step;
      log[n] = k < p.k_dim ? gate[k] : Gate(0.f);
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      decay[n] = expf(static_cast<float>(log[n]));
    }
  }

  // A number of the state, and what it adds to the sum.
  __device__ void advance(int n, float value, float& state, float& sum) const {
    state = decay[n] * state + static_cast<float>(key[n]) * value;
    sum += static_cast<float>(query[n]) * state;
  }
};

// States whose columns of V are neighbours in memory. kLanes lanes share a row, a run each; a lane
// sums its columns over rows that are a step apart. Neighbouring rows belong to the same group.
template <class Element_, int kRun, int kLanes>
struct AlongV {
  using Element = Element_;
  // Neighbouring rows of K. Tiles of 8 lanes a row and of 4 have equally many, and the same sums.
  static constexpr int kRows = kLanes == 32 ? 1 : 4;
  static constexpr int kGroupThreads = kLanes * kRows, kGroupRows = kStepLoads * kRows;
  static constexpr int kTileColumns = kLanes * kRun;

  // sums [columns]: of the group.
  __device__ static void advance(StepParams const& p, StepGrid const& grid, StateTile const& tile,
                                 int group, float* sums) {
    int const lane = threadIdx.x % kGroupThreads;
    int const row = lane / kLanes, column = lane % kLanes * kRun;
    float sum[kRun] = {};
    int const slot = slot_of(p, tile);
    if (slot >= 0 && tile.v_begin + column < p.v_dim) {
      StepInputs<Element> const in(p, grid, tile);
      int64_t const state = p.state.offset(slot, tile.head, 0, tile.v_begin + column);
      int const step = kRows << grid.groups_log2;
#pragma unroll 1
      for (int k = group * kRows + row; k < p.k_dim; k += kStepLoads * step) {
        add_rows(p, in, p.state.ptr + settled(state + k * p.state.k_stride), k, step, column, sum);
      }
    }
#pragma unroll
    for (int distance = kLanes; distance < kGroupThreads; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], distance);
      }
    }
    if (row == 0) {
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        sums[column + i] = sum[i];
      }
    }
  }

 private:
  // Rows k, k + step, …
  __device__ static void add_rows(StepParams const& p, StepInputs<Element> const& in, float* state,
                                  int k, int step, int column, float (&sum)[kRun]) {
    int64_t const stride = step * p.state.k_stride;
    StateRun<kRun> s[kStepLoads];
#pragma unroll
    for (int n = 0; n < kStepLoads; ++n) {
      if (k + n * step < p.k_dim) {
        s[n] = *reinterpret_cast<StateRun<kRun> const*>(state + n * stride);
      }
    }
    Element value[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      value[i] = in.v[column + i];
    }
    StepKeys<Element, kStepLoads> keys;
    keys.read(p, in, k, step);
#pragma unroll
    for (int n = 0; n < kStepLoads; ++n) {
      if (k + n * step < p.k_dim) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          keys.advance(n, static_cast<float>(value[i]), s[n].x[i], sum[i]);
        }
        *reinterpret_cast<StateRun<kRun>*>(state + n * stride) = s[n];
      }
    }
  }
};

// A state whose neighbours in memory are so in K. A group is a warp: lanes along K have a run each
// of a column of V, and add up their sums by shuffles.
template <class Element_, int kRun>
struct AlongK {
  using Element = Element_;
  static constexpr int kGroupThreads = 32;

  __device__ static void advance(StepParams const& p, StepGrid const& grid, StateTile const& tile,
                                 int group, float* sums) {
    int const lane = threadIdx.x % 32, lanes = 1 << grid.lanes_log2;
    int const along_k = lane & (lanes - 1);
    int const column = lane >> grid.lanes_log2, columns = 32 >> grid.lanes_log2;
    float sum[kStepLoads] = {};
    if (int const slot = slot_of(p, tile); slot >= 0) {
      StepInputs<Element> const in(p, grid, tile);
      int64_t const state = p.state.offset(slot, tile.head, 0, tile.v_begin + column);
      int const left = p.v_dim - tile.v_begin - column;
#pragma unroll 1
      for (int k = (group * lanes + along_k) * kRun; k < p.k_dim;
           k += (lanes * kRun) << grid.groups_log2) {
        add_columns(p, in, p.state.ptr + settled(state + k), k, column, columns, left, sum);
      }
    }
#pragma unroll 1
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int n = 0; n < kStepLoads; ++n) {
        sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], distance);
      }
    }
    if (along_k == 0) {
#pragma unroll
      for (int n = 0; n < kStepLoads; ++n) {
        sums[column + n * columns] = sum[n];
      }
    }
  }

 private:
  // Columns column, column + step, … of the tile; `left` exist from the first one on.
  __device__ static void add_columns(StepParams const& p, StepInputs<Element> const& in,
                                     float* state, int k, int column, int step, int left,
                                     float (&sum)[kStepLoads]) {
    int64_t const stride = step * p.state.v_stride;
    StateRun<kRun> s[kStepLoads];
#pragma unroll
    for (int n = 0; n < kStepLoads; ++n) {
      if (n * step < left) {
        s[n] = *reinterpret_cast<StateRun<kRun> const*>(state + n * stride);
      }
    }
    Element value[kStepLoads];
#pragma unroll
    for (int n = 0; n < kStepLoads; ++n) {
      if (n * step < left) {
        value[n] = in.v[column + n * step];
      }
    }
    StepKeys<Element, kRun> keys;
    keys.read(p, in, k, 1);
#pragma unroll
    for (int n = 0; n < kStepLoads; ++n) {
      if (n * step < left) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          keys.advance(i, static_cast<float>(value[n]), s[n].x[i], sum[n]);
        }
        *reinterpret_cast<StateRun<kRun>*>(state + n * stride) = s[n];
      }
    }
  }
};

template <class Way>
__global__ void __launch_bounds__(flash::linear::kMostStepThreads, 2)
    step_kernel(__grid_constant__ StepParams const p, __grid_constant__ StepGrid const grid) {
  using Element = typename Way::Element;
  auto* const sums = reinterpret_cast<float*>(dynamic_smem());  // [tiles, groups, columns]
  int const group = threadIdx.x / Way::kGroupThreads;           // of the CTA
  Way::advance(p, grid, state_tile(grid, group >> grid.groups_log2), group & (grid.groups() - 1),
               sums + (group << grid.columns_log2));
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < grid.tiles_of_cta << grid.columns_log2; i += blockDim.x) {
    int const in_cta = i >> grid.columns_log2, column = i & (grid.columns() - 1);
    StateTile const tile = state_tile(grid, in_cta);
    if (tile.exists && tile.v_begin + column < p.v_dim) {
      float const* const own = sums + (in_cta << (grid.groups_log2 + grid.columns_log2)) + column;
      float sum = 0.f;
      for (int g = 0; g < grid.groups(); ++g) {
        sum += own[g << grid.columns_log2];
      }
      auto* const o = static_cast<Element*>(p.o.ptr) + p.o.offset(0, tile.row, tile.head);
      o[tile.v_begin + column] = Element(p.scale * sum + 0.f);  // padding has no negative zeros
    }
  }
}

}  // namespace flash::sm80::linear
