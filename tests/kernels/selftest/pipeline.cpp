// A warp that loads and a warpgroup that multiplies, with a ring of two buffers between them.
#include <cutlass/arch/reg_reconfig.h>

#include "cases.h"
#include "core/dynamic_smem.h"

namespace selftest {

namespace {

using Element = bfloat16_t;
using Barrier = cutlass::arch::ClusterTransactionBarrier;
constexpr int kN = 128, kK = 64, kStages = 2;
using Mma = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kN>, Int<kK>>>()));
using TileA = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                     Shape<_64, Int<kK>, Int<kStages>>{}));
using TileB = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                     Shape<Int<kN>, Int<kK>, Int<kStages>>{}));

struct Storage {
  alignas(1024) Element a[kStages][64 * kK];
  alignas(1024) Element b[kStages][kN * kK];
  alignas(8) uint64_t full[kStages];
  uint64_t empty[kStages];
};

void produce(Storage& smem, CUtensorMap const& map_a, CUtensorMap const& map_b, int steps,
             Fault fault) {
  bool const elected = elect_one_sync();
  for (int step = 0; step < steps; ++step) {
    int const stage = step % kStages;
    if (fault != Fault::kNoEmptyWait) {
      Barrier::wait(&smem.empty[stage], step / kStages % 2 ^ 1);
    }
    if (elected) {
      Barrier::arrive_and_expect_tx(&smem.full[stage], sizeof(smem.a[0]) + sizeof(smem.b[0]));
      SM90_TMA_LOAD_2D::copy(&map_a, &smem.full[stage], 0, smem.a[stage], step * kK, 0);
      SM90_TMA_LOAD_2D::copy(&map_b, &smem.full[stage], 0, smem.b[stage], step * kK, 0);
    }
  }
}

void consume(Storage& smem, float* out, int steps, Fault fault) {
  Mma mma;
  auto slice = mma.get_slice(threadIdx.x);
  Tensor a = slice.partition_fragment_A(make_tensor(make_smem_ptr(smem.a[0]), TileA{}));
  Tensor b = slice.partition_fragment_B(make_tensor(make_smem_ptr(smem.b[0]), TileB{}));
  Tensor c = partition_fragment_C(mma, Shape<_64, Int<kN>>{});
  clear(c);
  for (int step = 0; step < steps; ++step) {
    int const stage = step % kStages;
    Barrier::wait(&smem.full[stage], step / kStages % 2);
    warpgroup_arrive();
    cute::gemm(mma, a(_, _, _, stage), b(_, _, _, stage), c);
    warpgroup_commit_batch();
    // The product before this one is done, and its buffer free.
    warpgroup_wait<1>();
    int const free = fault == Fault::kEarlyRelease ? step : step - 1;
    if (free >= 0 && fault != Fault::kNoRelease) {
      Barrier::arrive(&smem.empty[free % kStages]);
    }
  }
  warpgroup_wait<0>();
  Tensor target = make_tensor(make_gmem_ptr(out), Shape<_64, Int<kN>>{}, Stride<Int<kN>, _1>{});
  copy(c, slice.partition_C(target));
}

void pipeline_kernel(CUtensorMap const map_a, CUtensorMap const map_b, float* out, int steps,
                     Fault fault) {
  auto& smem = *reinterpret_cast<Storage*>(flash::dynamic_smem());
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      Barrier::init(&smem.full[stage], 1);
      Barrier::init(&smem.empty[stage], 128);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_alloc<240>();
    consume(smem, out, steps, fault);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<24>();
    if (cutlass::canonical_warp_idx_sync() == 4) {
      produce(smem, map_a, map_b, steps, fault);
    }
  }
}

}  // namespace

void run_pipeline(Matrices const& m, int k, Fault fault) {
  CUtensorMap const map_a = make_map(m.a, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, {k, 64}, {kK, 64}, 128);
  CUtensorMap const map_b = make_map(m.b, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, {k, kN}, {kK, kN}, 128);
  // Eight blocks do the same, in all orders that simt.h tries.
  launch<pipeline_kernel>(8, 384, sizeof(Storage), map_a, map_b, m.c, (k + kK - 1) / kK, fault);
}

}  // namespace selftest
