// What threads may do together, and what they may not.
#include <cutlass/arch/reg_reconfig.h>

#include <bit>

#include "cases.h"
#include "core/dynamic_smem.h"

namespace selftest {

namespace {

using Barrier = cutlass::arch::ClusterTransactionBarrier;
using cutlass::arch::NamedBarrier;

struct Storage {
  uint64_t barrier;
  int words[256];
};

using Body = void (*)(Storage&);

void threads_kernel(Body body) {
  auto& smem = *reinterpret_cast<Storage*>(flash::dynamic_smem());
  if (threadIdx.x == 0) {
    Barrier::init(&smem.barrier, 32);
  }
  __syncthreads();
  body(smem);
}

int warp() { return cutlass::canonical_warp_idx(); }

std::map<std::string, Body> const kBodies = {
    {"collectives",
     [](Storage&) {
       int const lane = threadIdx.x % 32;
       bool const right =
           __shfl_sync(~0u, lane, 7) == 7 && __shfl_xor_sync(~0u, lane, 5) == (lane ^ 5) &&
           __shfl_up_sync(~0u, lane, 4) == (lane < 4 ? lane : lane - 4) &&
           __shfl_down_sync(~0u, lane, 4) == (lane > 27 ? lane : lane + 4) &&
           __ballot_sync(~0u, lane % 2) == 0xaaaaaaaa && __any_sync(~0u, lane == 3) &&
           !__all_sync(~0u, lane == 3) && std::popcount(__ballot_sync(~0u, elect_one_sync())) == 1;
       simt::expect(right, "a collective is wrong");
     }},
    {"named barriers",
     [](Storage& smem) {
       // Warp 0 only arrives; the others wait for it.
       if (warp() == 0) {
         smem.words[threadIdx.x] = 5;
         NamedBarrier::arrive(128, 1);
       } else {
         NamedBarrier::sync(128, 1);
         simt::expect(smem.words[threadIdx.x % 32] == 5, "warp 0 has not been waited for");
       }
     }},
    {"half a warp at a barrier",
     [](Storage&) {
       if (warp() < 2) {
         if (threadIdx.x % 32 < 16) NamedBarrier::sync(32, 2);
       }
     }},
    {"one warp too few",
     [](Storage&) {
       if (warp() > 0) NamedBarrier::sync(128, 3);
     }},
    {"arriving twice",
     [](Storage&) {
       NamedBarrier::arrive(256, 4);
       NamedBarrier::arrive(256, 4);
     }},
    {"mbarrier phases",
     [](Storage& smem) {
       for (int phase = 0; phase < 5; ++phase) {
         if (warp() == phase % 2) {
           smem.words[phase] = phase;
           Barrier::arrive(&smem.barrier);
         }
         while (!Barrier::try_wait(&smem.barrier, phase % 2)) {
         }
         simt::expect(smem.words[phase] == phase, "the phase was over too early");
         __syncthreads();
       }
     }},
    {"one arrival too many",
     [](Storage& smem) {
       Barrier::expect_transaction(&smem.barrier, 16);
       if (warp() < 2) Barrier::arrive(&smem.barrier);
     }},
    {"one arrival too few",
     [](Storage& smem) {
       if (warp() == 0 && threadIdx.x > 0) Barrier::arrive(&smem.barrier);
       Barrier::wait(&smem.barrier, 0);
     }},
    {"polling for ever",
     [](Storage& smem) {
       while (!Barrier::try_wait(&smem.barrier, 0)) {
       }
     }},
    {"an mbarrier overwritten",
     [](Storage& smem) {
       smem.barrier = 0;
       Barrier::arrive(&smem.barrier);
     }},
    {"no mbarrier",
     [](Storage& smem) { Barrier::arrive(reinterpret_cast<uint64_t*>(&smem.words[2])); }},
    {"a divergent vote",
     [](Storage&) {
       if (threadIdx.x % 2) __any_sync(~0u, true);
     }},
    {"registers",
     [](Storage&) {
       // 384 threads start with 168 each.
       warp() < 4 ? cutlass::arch::warpgroup_reg_dealloc<24>()
                  : cutlass::arch::warpgroup_reg_alloc<240>();
     }},
    {"too many registers",
     [](Storage&) {
       warp() < 4 ? cutlass::arch::warpgroup_reg_dealloc<32>()
                  : cutlass::arch::warpgroup_reg_alloc<240>();
     }},
    {"a copy of words between words",
     [](Storage& smem) {
       alignas(8) static int const from[3] = {};
       using Copy = SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint64_t>;
       auto& to = reinterpret_cast<uint64_t&>(smem.words);
       Copy::copy(reinterpret_cast<uint64_t const&>(from[0]), to, true);
       cp_async_wait<0>();
       Copy::copy(reinterpret_cast<uint64_t const&>(from[1]), to, false);
     }},
    {"past shared memory", [](Storage& smem) { smem.words[256] = 1; }},
};

}  // namespace

void run_threads(std::string const& what) {
  int const threads = what.ends_with("registers") ? 384 : 128;
  launch<threads_kernel>(8, threads, sizeof(Storage), kBodies.at(what));
}

}  // namespace selftest
