// A warpgroup that computes half of O's columns.
#pragma once

#include "sm90/operand.h"
#include "sm90/paired_forward/loader.h"

namespace flash::sm90::forward {

template <class Config>
struct PairedValueWarpgroup {
  using Element = typename Config::Element;
  using MmaValues = typename Config::MmaValues;
  using TilePosition = RingPosition<Config::kStages>;
  using OutShape = Shape<Int<Config::kRows>, Int<Config::kValueColumns>>;

  PairedForwardArgs const& args;
  PairedRowBlock<Config> const& block;
  PairedForwardStorage<Config>& smem;
  uint32_t rank;
  int index;  // among these warpgroups
  int thread = threadIdx.x % kWarpgroup;
  FragmentCoord<1> coord{thread};
  decltype(partition_fragment_C(MmaValues{}, OutShape{})) out{};

  __device__ __forceinline__ void run() {
    clear(out);
    PairedTileLoader<Config> const loader{args, block, smem, rank};
    // K by one warpgroup's first warp, V by the other's: what one waits for does not hold up the
    // other's loads.
    bool const loads = thread < WarpLanes::kCount;
    bool const loads_k = loads && index == 0, loads_v = loads && index == 1;
    int const steps = block.range.count();
    if (loads_v) {
      loader.load_values(0);
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (loads_k) {
        loader.load_keys(step + 2);
      }
      RingPosition<Config::kProbabilityStages> const p_at(step);
      TilePosition const at(LoadOrder::value(step));
      // In this order: after P, the keys that were in V's buffer have arrived long ago.
      smem.p_ring.wait_full(p_at);
      smem.tile_ring.wait_full(at);
      smem.shifts.apply(p_at.stage, thread, coord, rows());
      start_values(p_at.stage, at.stage);
      if (loads_v) {
        loader.load_values(step + 1);
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(out);
      smem.p_ring.release(p_at);
      smem.tile_ring.release_in_pair(at.stage);
    }
  }

  // Stores the columns, through shared memory: where the last V was, whose other half the other
  // warpgroup may still read.
  __device__ void store() {
    constexpr int kColumns = Config::kValueColumns, kChunk = 8;
    int const steps = block.range.count();
    int const stage = TilePosition(LoadOrder::value(max(steps - 1, 0))).stage;
    Element* const tile = smem.tiles[stage] + index * kColumns * Config::kRows;
    smem.end_ring.wait_full(RingPosition<1>(0));
    float const scale[kRowsOfThread] = {smem.out_scale[coord.row(0)], smem.out_scale[coord.row(1)]};
    scale_rows(rows(), scale);
    sync();  // all warps are done with their part of V
    stage_rows(tile);
    sync();
    Element* const target = block.out + index * kColumns;
    int const columns = args.params.head_dim_v - index * kColumns;
#pragma unroll 4
    for (int i = thread; i < block.rows * (kColumns / kChunk); i += kWarpgroup) {
      int const row = i / (kColumns / kChunk), chunk = i % (kColumns / kChunk);
      int const run = chunk / 8 * Config::kRows * 64, in_run = (chunk ^ row) % 8 * kChunk;
      if (chunk * kChunk < columns) {
        *reinterpret_cast<uint128_t*>(target + row * args.params.out.row_stride + chunk * kChunk) =
            *reinterpret_cast<uint128_t const*>(tile + run + row * 64 + in_run);
      }
    }
  }

 private:
  __device__ void sync() const { cutlass::arch::NamedBarrier::sync(kWarpgroup, 1 + index); }

  __device__ auto rows() { return make_tensor(out.data(), rows_and_columns(out.layout())); }

  // Converted, as runs of 64 columns, whose eights are XORed with the row.
  __device__ void stage_rows(Element* tile) const {
    constexpr int kRunColumns = 64, kRunNumbers = kRunColumns / 2;  // numbers: of a thread
#pragma unroll
    for (int run = 0; run < Config::kValueColumns / kRunColumns; ++run) {
      Tensor part = make_tensor(out.data() + run * kRunNumbers, Layout<Int<kRunNumbers>>{});
      store_p<Element, kRunColumns>(part, tile + run * Config::kRows * kRunColumns, thread);
    }
  }

  // O += P·V, not waited for
  __device__ __forceinline__ void start_values(int p_stage, int stage) {
    Tensor p = make_tensor(make_smem_ptr(smem.p[p_stage]), typename Config::SmemLayoutP{});
    Tensor v = make_tensor(
        make_smem_ptr(smem.tiles[stage] + index * Config::kValueColumns * Config::kBlockN),
        typename Config::SmemLayoutV{});
    start_product<true>(MmaValues{}, operand_a<MmaValues>(p)(_, _, _, 0),
                        operand_b<MmaValues>(v)(_, _, _, 0), out);
  }
};

}  // namespace flash::sm90::forward
