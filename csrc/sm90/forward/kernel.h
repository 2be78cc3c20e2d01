// Attention forward for Hopper: a persistent grid of CTAs, each with a warpgroup that loads and two
// or three consumer warpgroups that compute 64 query rows each (FlashAttention-3, 2407.08608).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/dynamic_smem.h"
#include "sm90/forward/codes.h"
#include "sm90/forward/fp8_consumer.h"
#include "sm90/forward/late_store.h"
#include "sm90/forward/loader.h"
#include "sm90/forward/scheduler_warp.h"
#include "sm90/forward/transposer.h"

namespace flash::sm90::forward {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(__grid_constant__ ArgsOf<Config> const args) {
  auto& smem = *reinterpret_cast<SharedStorage<Config>*>(dynamic_smem());
  let_next_launch_start();
  if (threadIdx.x == 32) {  // on their way while the first row block is found
    auto const* const k = Config::kPagesOnly ? k_boxes<Config>(args) : &args.k;
    auto const* const v = Config::kPagesOnly ? v_boxes<Config>(args) : &args.v;
    for (TensorMap const* const tensor : {&args.q, k, v}) {
      prefetch_tma_descriptor(&tensor->map);
    }
    if constexpr (Config::kLargePages) {
#pragma unroll 1
      for (int i = 1; i < PageBox::kSizes; ++i) {
        prefetch_tma_descriptor(&k[i].map);
        prefetch_tma_descriptor(&v[i].map);
      }
    }
  }
  if (threadIdx.x < 32) {
    int const blocks = sharing_blocks<Config>(args);
    if (threadIdx.x == 0) {
      smem.init(blocks, args.params.pages.table);
    }
  }
  if constexpr (Config::kSplit) {
    if (threadIdx.x >= kWarpgroup) {
      constexpr int kIdle = Config::kThreads - kWarpgroup;
      prefetch_table(args.params.pages, args.params.seqlens.batch,
                     int64_t(blockIdx.x) * kIdle + threadIdx.x - kWarpgroup);
    }
  }
  __syncthreads();
  if (static_cast<int>(blockIdx.x) >= smem.blocks) {
    return;
  }
  // The shuffle tells the compiler that this is the same in all lanes.
  int const warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoaderRegisters>();
    int const warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      SchedulerWarp<Config>{args, smem, static_cast<bool>(elect_one_sync())}.run();
      if constexpr (Config::kSplit || Config::kMaxLogits != MaxLogitsIn::None) {
        wait_for_launch_before();  // for the next launch, which waits for this one only
      }
    } else if (warp == 1) {
      Loader<Config>{args, smem, static_cast<bool>(elect_one_sync())}.run();
    } else if constexpr (Config::kFp8) {
      Transposer<Config>{smem}.run();
    } else if constexpr (Config::kServesPages) {
      if (args.params.pages.table && warp == 2) {
        load_k_from_pages<Config>(args, smem);
      } else if (args.params.pages.table && warp == 3) {
        load_v_from_pages<Config>(args, smem);
      }
    }
  } else if (Config::kConvertsKeys && warpgroup > Config::kConsumers) {
    if constexpr (Config::kConvertsKeys) {
      cutlass::arch::warpgroup_reg_dealloc<Config::kConverterRegisters>();
      Converter<Config>{args, smem}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    using Consumers = std::conditional_t<Config::kFp8, Fp8Consumer<Config>, Consumer<Config>>;
    Consumers{args, smem}.run();
  }
}

}  // namespace flash::sm90::forward
