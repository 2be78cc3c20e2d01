// A warpgroup that computes half of O's columns.
#pragma once

#include "sm90/latent/loader.h"
#include "sm90/operand.h"

namespace flash::sm90::latent {

template <class Config>
struct ValueWarpgroup {
  using Element = typename Config::Element;
  using MmaValues = typename Config::MmaValues;
  using Position = RingPosition<Config::kStages>;
  using OutShape = Shape<Int<Config::kBlockM>, Int<Config::kValueColumns>>;

  LatentArgs const& args;
  decode::DecodeWork<Config> const& work;
  LatentStorage<Config>& smem;
  int index;  // among these warpgroups
  int thread = threadIdx.x % kWarpgroup;
  FragmentCoord<1> coord{thread};
  decltype(partition_fragment_C(MmaValues{}, OutShape{})) out{};

  __device__ __forceinline__ void run() {
    clear(out);
    KeyLoader<Config> const loader{args, work, smem};
    bool const loads = index == 0 && thread < WarpLanes::kCount;
    PageSlot slot = loads ? loader.look_up(Config::kStages - 1) : PageSlot{};
    int const tiles = (work.end - work.begin + Config::kBlockN - 1) / Config::kBlockN;
    Position at(0);
#pragma unroll 1
    for (int number = 0; number < tiles; ++number) {
      if (loads) {  // into the buffer that the tile before has left
        int const next = number + Config::kStages - 1;
        loader.load(next, slot);
        slot = loader.look_up(next + 1);
      }
      smem.key_ring.wait_full(at);
      smem.p_ring.wait_full(at);
      smem.shifts.apply(at.stage, thread, coord, rows());
      start_values(at.stage);
      warpgroup_wait<0>();
      warpgroup_fence_operand(out);
      smem.key_ring.release(at);
      at.advance();
    }
  }

  // Sends each row's columns to the CTA of the cluster that merges it.
  __device__ void send(decode::PieceShare const& share) {
    Tensor o = rows();
    int const col = index * Config::kValueColumns;
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      int const row = coord.row(r);
      decode::InboxPlace const to(share, row);
      float const scale = smem.out_scale[row];
      if (row < work.tile.rows) {
#pragma unroll
        for (int c = 0; c < size<1>(o); c += 2) {
          to.block.write(*reinterpret_cast<float2*>(&smem.inbox.out[to.index][col + coord.col(c)]),
                         float2{scale * o(r, c), scale * o(r, c + 1)});
        }
      }
    }
  }

  // Stores the columns in shared memory.
  __device__ void store() {
    Tensor o = rows();
    int const col = index * Config::kValueColumns;
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
#pragma unroll
      for (int c = 0; c < size<1>(o); c += 2) {
        *reinterpret_cast<float2*>(&smem.out[coord.row(r)][col + coord.col(c)]) = {o(r, c),
                                                                                   o(r, c + 1)};
      }
    }
  }

 private:
  __device__ auto rows() { return make_tensor(out.data(), rows_and_columns(out.layout())); }

  // O += P·V, not waited for
  __device__ __forceinline__ void start_values(int stage) {
    Element* const keys = smem.keys[stage];
    Tensor p =
        make_tensor(make_smem_ptr(keys + Config::kRotatedPlace), typename Config::SmemLayoutP{});
    Tensor v = make_tensor(make_smem_ptr(keys + index * Config::kValueColumns * Config::kBlockN),
                           typename Config::SmemLayoutV{});
    start_product<true>(MmaValues{}, operand_a<MmaValues>(p)(_, _, _, 0),
                        operand_b<MmaValues>(v)(_, _, _, 0), out);
  }
};

}  // namespace flash::sm90::latent
