// Clusters of two blocks: what those may do together, and what they may not.
#include "cases.h"
#include "core/dynamic_smem.h"
#include "sm90/cluster.h"

namespace selftest {

namespace {

using flash::sm90::Barrier;
constexpr int kThreads = 64, kRows = 16, kColumns = 32;
constexpr int kHalf = kRows / 2 * kColumns;  // elements

struct Storage {
  alignas(128) float halves[2][kHalf];
  alignas(128) float mine[kHalf];
  uint64_t full;   // an arrival, and bytes
  uint64_t ready;  // an arrival of each of a block's threads
  uint64_t late;
};

struct Call {
  Storage& smem;
  CUtensorMap const& map;  // of [16, 32]
  float* out;              // [blocks, 16, 32]
  uint32_t rank = block_rank_in_cluster();
  uint32_t other = 1 - rank;

  Barrier& full() const { return reinterpret_cast<Barrier&>(smem.full); }
  Barrier& ready() const { return reinterpret_cast<Barrier&>(smem.ready); }
  float* of_cluster() const { return out + blockIdx.x / 2; }
};

using Body = void (*)(Call const&);

void clusters_kernel(bool begins, Body body, CUtensorMap const map, float* out) {
  Call const call{*reinterpret_cast<Storage*>(flash::dynamic_smem()), map, out};
  if (threadIdx.x == 0) {
    call.full().init(1);
    call.ready().init(kThreads);
    cutlass::arch::fence_barrier_init();
  }
  if (begins) cluster_sync();
  body(call);
}

bool first_thread() { return threadIdx.x == 0; }

void announce(Call const& call, uint32_t bytes) {
  if (first_thread()) {
    call.full().arrive_and_expect_tx(bytes);
  }
}

// This block's half, to the blocks of the mask.
void load(Call const& call, uint16_t blocks) {
  if (first_thread()) {
    SM90_TMA_LOAD_MULTICAST_2D::copy(&call.map, &call.smem.full, blocks, 0,
                                     call.smem.halves[call.rank], 0, call.rank * kRows / 2);
  }
}

// Numbers where both blocks' bytes are going to be.
void clear(Call const& call) {
  for (int i = threadIdx.x; i < kHalf; i += kThreads) {
    call.smem.halves[0][i] = call.smem.halves[1][i] = 0;
  }
  cutlass::arch::fence_view_async_shared();
  cluster_sync();
}

// What the other block is going to get.
void fill(Call const& call) {
  for (int i = threadIdx.x; i < kHalf; i += kThreads) {
    call.smem.mine[i] = blockIdx.x * 1000 + i;
  }
}

void send(Call const& call) {
  if (first_thread()) {
    flash::sm90::copy_to_block(call.other, call.smem.mine, call.smem.halves[call.rank],
                               sizeof(call.smem.mine), call.full());
  }
}

void fill_and_send(Call const& call) {
  fill(call);
  cutlass::arch::fence_view_async_shared();
  __syncthreads();
  send(call);
}

void write_out(Call const& call) {
  float* const to = call.out + blockIdx.x * 2 * kHalf;
  for (int i = threadIdx.x; i < kHalf; i += kThreads) {
    to[i] = call.smem.halves[0][i];
    to[kHalf + i] = call.smem.halves[1][i];
  }
}

std::map<std::string, Body> const kBodies = {
    {"ranks",
     [](Call const& call) {
       // After a turn of the other block, too.
       for (int turn = 0; turn < 3; ++turn) {
         bool const right = block_rank_in_cluster() == blockIdx.x % 2 &&
                            block_id_in_cluster().x == call.rank && cluster_shape().x == 2 &&
                            cluster_id_in_grid().x * 2 + call.rank == blockIdx.x &&
                            cluster_grid_dims().x * 2 == gridDim.x;
         simt::expect(right, "a rank is wrong");
         uint32_t const at = cast_smem_ptr_to_uint(&call.smem.full);
         simt::expect(set_block_rank(at, call.rank) == at && set_block_rank(at, call.other) != at,
                      "an address is wrong");
         cluster_sync();
       }
     }},
    {"memories",
     [](Call const& call) {
       call.smem.mine[threadIdx.x] = call.rank;
       cluster_sync();
       simt::expect(call.smem.mine[threadIdx.x] == call.rank, "it is another block's memory");
     }},
    {"orders",
     [](Call const& call) {
       float& first = *call.of_cluster();
       if (first < 0) first = call.rank;
     }},
    {"barrier",
     [](Call const& call) {
       float& arrived = *call.of_cluster();
       for (int round = 0; round < 3; ++round) {
         // Block 1 arrives when all of block 0 have gone on after their arrival.
         if (call.rank == 1) call.ready().wait(round % 2);
         ++arrived;
         cluster_arrive();
         if (call.rank == 0) call.ready().arrive(1);
         cluster_wait();
         simt::expect(arrived + 1 >= (round + 1) * 2 * kThreads, "it is over too early");
       }
     }},
    {"barrier without some",
     [](Call const& call) {
       if (call.rank == 1 && threadIdx.x < 32) return;
       cluster_arrive();
       if (call.rank == 0 && threadIdx.x < 32) return;
       cluster_wait();
       cluster_sync();
     }},
    {"remote arrivals",
     [](Call const& call) {
       for (int round = 0; round < 3; ++round) {
         call.out[blockIdx.x * kThreads + threadIdx.x] = round;
         call.ready().arrive(call.other);
         call.ready().wait(round % 2);
         float const seen = call.out[(blockIdx.x ^ 1) * kThreads + threadIdx.x];
         simt::expect(seen >= round, "the phase was over too early");
         cluster_sync();
       }
     }},
    {"remote bytes",
     [](Call const& call) {
       if (first_thread()) {
         uint32_t const bytes = 16 + call.rank * 16;
         call.full().arrive_and_expect_tx(bytes + 16, call.other);
         Barrier::complete_transaction(&call.smem.full, call.other, bytes);
         call.full().complete_transaction(16);
       }
       call.full().wait(0);
       cluster_sync();
     }},
    {"multicast",
     [](Call const& call) {
       announce(call, sizeof(call.smem.halves));
       load(call, 0b11);
       call.full().wait(0);
       write_out(call);
     }},
    {"multicast, announced late",
     [](Call const& call) {
       load(call, 0b11);
       if (call.rank == 1) call.ready().wait(0);
       announce(call, sizeof(call.smem.halves));
       call.full().wait(0);
       if (call.rank == 0) call.ready().arrive(1);
       write_out(call);
     }},
    {"multicast, not waited for",
     [](Call const& call) {
       clear(call);
       announce(call, sizeof(call.smem.halves));
       load(call, 0b11);
       cluster_sync();
       write_out(call);
       call.full().wait(0);
     }},
    {"multicast to the other",
     [](Call const& call) {
       announce(call, sizeof(call.smem.mine));
       load(call, 1 << call.other);
       call.full().wait(0);
       write_out(call);
     }},
    {"copies",
     [](Call const& call) {
       announce(call, sizeof(call.smem.mine));
       fill_and_send(call);
       call.full().wait(0);
       write_out(call);
       cluster_sync();
     }},
    {"copies, not waited for",
     [](Call const& call) {
       clear(call);
       announce(call, sizeof(call.smem.mine));
       fill_and_send(call);
       cluster_sync();
       write_out(call);
       call.full().wait(0);
       cluster_sync();
     }},
    {"an unfenced source",
     [](Call const& call) {
       fill(call);
       __syncthreads();
       send(call);
       call.full().wait(0);
     }},
    {"an unfenced target",
     [](Call const& call) {
       call.smem.halves[call.other][threadIdx.x] = 1;
       cluster_sync();
       send(call);
       call.full().wait(0);
     }},
    {"a source changed",
     [](Call const& call) {
       announce(call, sizeof(call.smem.mine));
       fill_and_send(call);
       if (first_thread()) call.smem.mine[5] = -1;
       call.full().wait(0);
     }},
    {"a sender that ends",
     [](Call const& call) {
       announce(call, sizeof(call.smem.mine));
       call.rank == 0 ? fill_and_send(call) : call.full().wait(0);
     }},
    {"a receiver that ends",
     [](Call const& call) {
       if (call.rank == 1) {
         call.ready().wait(0);  // the copy is on its way
       } else {
         fill_and_send(call);
         call.ready().arrive(1);
         call.full().wait(0);
       }
     }},
    {"a multicast to a block that ends",
     [](Call const& call) {
       if (call.rank == 1) {
         call.ready().wait(0);
       } else {
         load(call, 0b11);
         call.ready().arrive(1);
         call.full().wait(0);
       }
     }},
    {"an arrival at a block that has ended",
     [](Call const& call) {
       if (call.rank == 0) {
         cluster_sync();  // of those that have not ended
         call.ready().arrive(1);
       }
     }},
    {"an arrival at a block that has not begun",
     [](Call const& call) { call.ready().arrive(call.other); }},
    {"a deadlock of two blocks",
     [](Call const& call) { call.rank == 0 ? call.ready().wait(0) : cluster_sync(); }},
    {"an mbarrier that is not there yet",
     [](Call const& call) {
       if (first_thread()) {
         Barrier::init(&call.smem.late, 1);
         Barrier::arrive(&call.smem.late, call.other, true);
       }
     }},
    {"an mbarrier that others may not see yet",
     [](Call const& call) {
       if (first_thread()) Barrier::init(&call.smem.late, 1);
       cluster_sync();
       if (first_thread()) Barrier::arrive(&call.smem.late, call.other, true);
     }},
    {"arriving twice", [](Call const&) { cluster_arrive(), cluster_arrive(); }},
    {"waiting first", [](Call const&) { cluster_wait(); }},
    {"no such block", [](Call const& call) { call.ready().arrive(2); }},
    {"no such block of a mask", [](Call const& call) { load(call, 0b101); }},
    {"no block of a mask", [](Call const& call) { load(call, 0); }},
    {"past the second block's memory",
     [](Call const& call) {
       if (call.rank == 1) (&call.smem + 1)->mine[0] = 1;
     }},
};

}  // namespace

void run_clusters(std::string const& what, int blocks, void const* x, float* out) {
  CUtensorMap const map =
      make_map(x, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {kColumns, kRows}, {kColumns, kRows / 2}, 0);
  bool const begins = what != "an arrival at a block that has not begun";
  launch<clusters_kernel>({blocks, kThreads, sizeof(Storage), 2}, begins, kBodies.at(what), map,
                          out);
}

}  // namespace selftest
