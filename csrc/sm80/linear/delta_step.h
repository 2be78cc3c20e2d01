// One token of each sequence through the gated delta rule: S = e^g S + k uᵀ in place, with
// u = beta (v − e^g Sᵀk), and o = scale Sᵀ q. Nothing of S changes before all of Sᵀk is known, so a
// thread keeps its numbers of S in shared memory until then: with few registers a thread, many CTAs
// are resident and have their reads under way. o takes Sᵀq of the state before the token,
// o = scale (e^g Sᵀq + (q·k) u): both sums are made in one pass and meet in shared memory once.
#pragma once

#include "core/copy_async.h"
#include "linear/delta_step.h"
#include "sm80/linear/step.h"

namespace flash::sm80::linear {

using flash::linear::DeltaStepParams;
using flash::linear::StepGate;

// Which numbers of a tile a lane has: `row(i)` of K and `column(j)` of the tile, in kLoads runs.
// Number x of run n has the row i = row_of(n, x) and the column j = column_of(n, x).
// States whose columns of V are neighbours: a run lies along V, and runs are some rows apart. A row
// has kLanes lanes, and a group kRowLanes neighbouring rows, as many whatever kLanes is: it changes
// no sum.
template <class Element_, int kRun_, int kLanes, int kRowLanes_, int kLoads_>
struct DeltaAlongV {
  using Element = Element_;
  static constexpr int kRun = kRun_, kLoads = kLoads_;
  static constexpr int kRows = kLoads, kColumns = kRun;
  static constexpr int kRowLanes = kRowLanes_;
  static constexpr int kGroupThreads = kLanes * kRowLanes, kGroupRows = kLoads * kRowLanes;
  static constexpr int kTileColumns = kLanes * kRun;
  static_assert(kGroupRows * flash::linear::kMostStepGroups == flash::linear::kDeltaStepK);

  int first_row, row_step, first_column;

  __device__ DeltaAlongV(StepGrid const& grid, int group) {
    int const lane = threadIdx.x % kGroupThreads;
    first_row = group * kRowLanes + lane / kLanes;
    row_step = kRowLanes << grid.groups_log2;
    first_column = lane % kLanes * kRun;
  }
  __device__ int row(int i) const { return first_row + i * row_step; }
  __device__ int column(int j) const { return first_column + j; }
  // The row of a run, and its first column.
  __device__ int run_row(int n) const { return row(n); }
  __device__ int run_column(int) const { return first_column; }
  __device__ static constexpr int row_of(int n, int) { return n; }
  __device__ static constexpr int column_of(int, int x) { return x; }

  // The sum over the lanes that have other rows of the same columns, in all of them.
  __device__ float sum_of_lanes(float x) const {
#pragma unroll
    for (int distance = kLanes; distance < kGroupThreads; distance *= 2) {
      x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
  }
  // Whether this lane leaves sums of its columns, and whether those of no column.
  __device__ bool leaves() const { return threadIdx.x % kGroupThreads < kLanes; }
  __device__ bool is_first() const { return threadIdx.x % kGroupThreads == 0; }
};

// States whose rows of K are neighbours: a run lies along K, runs are some columns apart, and a
// group is a warp.
template <class Element_, int kRun_>
struct DeltaAlongK {
  using Element = Element_;
  static constexpr int kRun = kRun_, kLoads = kStepLoads;
  static constexpr int kRows = kRun, kColumns = kLoads;
  static constexpr int kGroupThreads = 32;
  static_assert(32 * kRun * flash::linear::kMostStepGroups >= flash::linear::kDeltaStepK);

  int lanes, first_row, first_column, column_step;

  __device__ DeltaAlongK(StepGrid const& grid, int group) {
    int const lane = threadIdx.x % 32;
    lanes = 1 << grid.lanes_log2;
    first_row = (group * lanes + (lane & (lanes - 1))) * kRun;
    first_column = lane >> grid.lanes_log2;
    column_step = 32 >> grid.lanes_log2;
  }
  __device__ int row(int i) const { return first_row + i; }
  __device__ int column(int j) const { return first_column + j * column_step; }
  __device__ int run_row(int) const { return first_row; }
  __device__ int run_column(int n) const { return column(n); }
  __device__ static constexpr int row_of(int, int x) { return x; }
  __device__ static constexpr int column_of(int n, int) { return n; }

  __device__ float sum_of_lanes(float x) const {
#pragma unroll 1
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
  }
  __device__ bool leaves() const { return (threadIdx.x & (lanes - 1)) == 0; }
  __device__ bool is_first() const { return threadIdx.x % 32 == 0; }
};

// What a group leaves in shared memory: [columns] of Sᵀk, [columns] of Sᵀq, and k·k, q·q, q·k. The
// first group's Sᵀk is where the tile's u comes.
struct DeltaParts {
  float* begin;
  int columns;

  static constexpr int kProducts = 4;  // one is not used
  FLASH_HD static int size(int columns) { return 2 * columns + kProducts; }

  __device__ DeltaParts group(int number) const {
    return {begin + number * size(columns), columns};
  }
  __device__ float* keys() const { return begin; }
  __device__ float* queries() const { return begin + columns; }
  __device__ float* products() const { return begin + 2 * columns; }
};

// What u and o of a column take beside the sums.
struct DeltaColumn {
  bool has_state;  // else the column does not exist, or its row has no state
  float value, decay, beta;
};

// A number a head: a log decay, or beta.
template <class Element>
__device__ float of_head(StepGate const& x, StateTile const& tile) {
  int64_t const at = tile.row * x.row_stride + tile.head * x.head_stride;
  return x.fp32 ? static_cast<float const*>(x.ptr)[at]
                : static_cast<float>(static_cast<Element const*>(x.ptr)[at]);
}

template <class Element>
__device__ DeltaColumn delta_column(DeltaStepParams const& p, StepGrid const& grid,
                                    StateTile const& tile, int column) {
  StepParams const& step = p.step;
  if (!tile.exists || tile.v_begin + column >= step.v_dim) {
    return {false};
  }
  StepInputs<Element> const in(step, grid, tile);
  float const value = static_cast<float>(in.v[column]);
  float const log = step.gate.ptr ? of_head<Element>(step.gate, tile) : 0.f;
  float const beta = p.beta.ptr ? of_head<Element>(p.beta, tile) : 1.f;
  return {slot_of(step, tile) >= 0, value, expf(log),
          p.of_sigmoid == 0.f ? beta : p.of_sigmoid / (1.f + expf(-beta))};
}

// A CTA's shared memory.
template <class Way>
struct DeltaSmem {
  using Run = StateRun<Way::kRun>;

  Run* runs;             // [kLoads, threads]
  DeltaColumn* columns;  // [tiles, columns]
  float* parts;          // [tiles, groups, DeltaParts]

  static int bytes(StepGrid const& grid, int threads) {
    int const groups = grid.tiles_of_cta << grid.groups_log2;
    return threads * Way::kLoads * static_cast<int>(sizeof(Run)) +
           (grid.tiles_of_cta << grid.columns_log2) * static_cast<int>(sizeof(DeltaColumn)) +
           groups * DeltaParts::size(grid.columns()) * static_cast<int>(sizeof(float));
  }
  __device__ explicit DeltaSmem(StepGrid const& grid)
      : runs(reinterpret_cast<Run*>(dynamic_smem())),
        columns(reinterpret_cast<DeltaColumn*>(runs + blockDim.x * Way::kLoads)),
        parts(reinterpret_cast<float*>(columns + (grid.tiles_of_cta << grid.columns_log2))) {}
};

// A lane's numbers of a state, and of k.
template <class Way>
struct DeltaLane {
  using Element = typename Way::Element;
  using Run = StateRun<Way::kRun>;
  static constexpr int kRows = Way::kRows, kColumns = Way::kColumns;

  StepParams const& p;
  StateTile const& tile;
  Way const way;
  int const columns;   // of the tile that exist
  float* const state;  // of the slot and head, at the tile's first column
  Run* const runs;     // [kLoads] in shared memory, blockDim.x apart
  Element key[kRows], query[kRows];

  __device__ DeltaLane(StepParams const& p, StepGrid const& grid, StateTile const& tile, int group,
                       int slot, Run* runs)
      : p(p),
        tile(tile),
        way(grid, group),
        columns(slot < 0 ? 0 : p.v_dim - tile.v_begin),
        state(p.state.ptr +
              settled(slot < 0 ? 0 : p.state.offset(slot, tile.head, 0, tile.v_begin))),
        runs(runs) {}

  __device__ bool exists(int n) const {
    return way.run_row(n) < p.k_dim && way.run_column(n) < columns;
  }
  __device__ Run* run(int n) const {
    return reinterpret_cast<Run*>(state + way.run_row(n) * p.state.k_stride +
                                  way.run_column(n) * p.state.v_stride);
  }
  __device__ Run& kept(int n) const { return runs[n * blockDim.x]; }

  // Asks for the state, and for k and q. Only this thread reads what arrives, so waiting for it
  // needs no barrier.
  __device__ void ask(StepGrid const& grid) {
    using Word = cute::conditional_t<Way::kRun == 4, cute::uint128_t, float>;
    using Copy = cute::conditional_t<Way::kRun == 4, cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Word>,
                                     cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<Word>>;
#pragma unroll
    for (int n = 0; n < Way::kLoads; ++n) {
      bool const is_there = exists(n);
      float const* const source = is_there ? run(n)->x : p.state.ptr;
      Copy::copy(*reinterpret_cast<Word const*>(source), reinterpret_cast<Word&>(kept(n)),
                 is_there);
    }
    cute::cp_async_fence();
    StepInputs<Element> const in(p, grid, tile);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      bool const is_row = columns > 0 && way.row(i) < p.k_dim;
      key[i] = is_row ? in.k[way.row(i)] : Element(0.f);
      query[i] = is_row ? in.q[way.row(i)] : Element(0.f);
    }
  }

  // Leaves the sums of the lane's group.
  __device__ void leave_sums(DeltaParts const& parts) {
    float products[3] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float const k = static_cast<float>(key[i]), q = static_cast<float>(query[i]);
      products[0] += k * k;
      products[1] += q * q;
      products[2] += q * k;
    }
    float of_keys[kColumns] = {}, of_queries[kColumns] = {};
    cute::cp_async_wait<0>();
    compiler_fence();
#pragma unroll
    for (int n = 0; n < Way::kLoads; ++n) {
      Run const s = kept(n);
#pragma unroll
      for (int x = 0; x < Way::kRun; ++x) {
        int const i = Way::row_of(n, x), j = Way::column_of(n, x);
        of_keys[j] += static_cast<float>(key[i]) * s.x[x];
        of_queries[j] += static_cast<float>(query[i]) * s.x[x];
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float const keys = way.sum_of_lanes(of_keys[j]), queries = way.sum_of_lanes(of_queries[j]);
      if (way.leaves()) {
        parts.keys()[way.column(j)] = keys;
        parts.queries()[way.column(j)] = queries;
      }
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      float const sum = way.sum_of_lanes(products[i]);
      if (way.is_first()) {
        parts.products()[i] = sum;
      }
    }
  }

  // S = decay S + k uᵀ
  __device__ void write(float decay, float const* u) {
    float value[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      value[j] = u[way.column(j)];
    }
#pragma unroll
    for (int n = 0; n < Way::kLoads; ++n) {
      if (exists(n)) {
        Run s = kept(n);
#pragma unroll
        for (int x = 0; x < Way::kRun; ++x) {
          s.x[x] = decay * s.x[x] +
                   static_cast<float>(key[Way::row_of(n, x)]) * value[Way::column_of(n, x)];
        }
        *run(n) = s;
      }
    }
  }
};

// The groups' sums of a column of a tile, as u, which takes their place, and o.
template <class Element>
__device__ void set_column(DeltaStepParams const& delta, StepGrid const& grid,
                           StateTile const& tile, DeltaParts const& parts, int column,
                           DeltaColumn const& in) {
  constexpr float kEpsilon = 1e-6f;
  StepParams const& p = delta.step;
  float keys = 0.f, queries = 0.f, products[3] = {};
  for (int g = 0; g < grid.groups(); ++g) {
    DeltaParts const own = parts.group(g);
    keys += own.keys()[column];
    queries += own.queries()[column];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      products[i] += own.products()[i];
    }
  }
  float const of_k = delta.normalizes ? 1.f / sqrtf(products[0] + kEpsilon) : 1.f;
  float const of_q = (delta.normalizes ? 1.f / sqrtf(products[1] + kEpsilon) : 1.f) * p.scale;
  float const u = in.beta * (in.value - in.decay * (keys * of_k)) * of_k;
  auto* const o = static_cast<Element*>(p.o.ptr) + p.o.offset(0, tile.row, tile.head);
  o[tile.v_begin + column] = Element(of_q * (in.decay * queries + products[2] * u));
  parts.keys()[column] = u;
}

// Registers for three CTAs of the most threads, which are six of 128: for more, some spill.
template <class Way>
__global__ void __launch_bounds__(flash::linear::kMostStepThreads, 3)
    delta_step_kernel(__grid_constant__ DeltaStepParams const p,
                      __grid_constant__ StepGrid const grid) {
  using Element = typename Way::Element;
  StepParams const& step = p.step;
  DeltaSmem<Way> const smem(grid);
  DeltaParts const parts{smem.parts, grid.columns()};
  int const group = threadIdx.x / Way::kGroupThreads;  // of the CTA
  int const in_cta = group >> grid.groups_log2;
  int const columns = grid.tiles_of_cta << grid.columns_log2;
  StateTile const tile = state_tile(grid, in_cta);
  DeltaLane<Way> lane(step, grid, tile, group & (grid.groups() - 1), slot_of(step, tile),
                      smem.runs + threadIdx.x);
  lane.ask(grid);
#pragma unroll 1
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    StateTile const of = state_tile(grid, i >> grid.columns_log2);
    smem.columns[i] = delta_column<Element>(p, grid, of, i & (grid.columns() - 1));
  }
  lane.leave_sums(parts.group(group));
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    int const other = i >> grid.columns_log2, column = i & (grid.columns() - 1);
    StateTile const of = state_tile(grid, other);
    if (smem.columns[i].has_state) {
      set_column<Element>(p, grid, of, parts.group(other << grid.groups_log2), column,
                          smem.columns[i]);
    } else if (of.exists && of.v_begin + column < step.v_dim) {
      auto* const o = static_cast<Element*>(step.o.ptr) + step.o.offset(0, of.row, of.head);
      o[of.v_begin + column] = Element(0.f);
    }
  }
  __syncthreads();
  lane.write(smem.columns[in_cta << grid.columns_log2].decay,
             parts.group(in_cta << grid.groups_log2).keys());
}

}  // namespace flash::sm80::linear
