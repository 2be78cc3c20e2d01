// CuTe's header, but for tiles and runs of bytes, which go through the unit of bulk_copies.h.
// Im2col and 1D boxes stay CuTe's, which assert that there is a GPU.
#pragma once

#define SM90_TMA_LOAD SM90_TMA_LOAD_gpu
#define SM90_TMA_LOAD_2D SM90_TMA_LOAD_2D_gpu
#define SM90_TMA_LOAD_3D SM90_TMA_LOAD_3D_gpu
#define SM90_TMA_LOAD_4D SM90_TMA_LOAD_4D_gpu
#define SM90_TMA_LOAD_5D SM90_TMA_LOAD_5D_gpu
#define SM90_TMA_LOAD_MULTICAST SM90_TMA_LOAD_MULTICAST_gpu
#define SM90_TMA_LOAD_MULTICAST_2D SM90_TMA_LOAD_MULTICAST_2D_gpu
#define SM90_TMA_LOAD_MULTICAST_3D SM90_TMA_LOAD_MULTICAST_3D_gpu
#define SM90_TMA_LOAD_MULTICAST_4D SM90_TMA_LOAD_MULTICAST_4D_gpu
#define SM90_TMA_LOAD_MULTICAST_5D SM90_TMA_LOAD_MULTICAST_5D_gpu
#define SM90_TMA_STORE SM90_TMA_STORE_gpu
#define SM90_TMA_STORE_2D SM90_TMA_STORE_2D_gpu
#define SM90_TMA_STORE_3D SM90_TMA_STORE_3D_gpu
#define SM90_TMA_STORE_4D SM90_TMA_STORE_4D_gpu
#define SM90_TMA_STORE_5D SM90_TMA_STORE_5D_gpu
#define SM90_TMA_REDUCE_ADD SM90_TMA_REDUCE_ADD_gpu
#define SM90_TMA_REDUCE_ADD_2D SM90_TMA_REDUCE_ADD_2D_gpu
#define SM90_TMA_REDUCE_ADD_3D SM90_TMA_REDUCE_ADD_3D_gpu
#define SM90_TMA_REDUCE_ADD_4D SM90_TMA_REDUCE_ADD_4D_gpu
#define SM90_TMA_REDUCE_ADD_5D SM90_TMA_REDUCE_ADD_5D_gpu
#define SM90_BULK_COPY_G2S SM90_BULK_COPY_G2S_gpu
#define SM90_BULK_COPY_S2G SM90_BULK_COPY_S2G_gpu
#define tma_store_fence tma_store_fence_gpu
#define tma_store_arrive tma_store_arrive_gpu
#define tma_store_wait tma_store_wait_gpu
#include_next <cute/arch/copy_sm90_tma.hpp>
#undef SM90_TMA_LOAD
#undef SM90_TMA_LOAD_2D
#undef SM90_TMA_LOAD_3D
#undef SM90_TMA_LOAD_4D
#undef SM90_TMA_LOAD_5D
#undef SM90_TMA_LOAD_MULTICAST
#undef SM90_TMA_LOAD_MULTICAST_2D
#undef SM90_TMA_LOAD_MULTICAST_3D
#undef SM90_TMA_LOAD_MULTICAST_4D
#undef SM90_TMA_LOAD_MULTICAST_5D
#undef SM90_TMA_STORE
#undef SM90_TMA_STORE_2D
#undef SM90_TMA_STORE_3D
#undef SM90_TMA_STORE_4D
#undef SM90_TMA_STORE_5D
#undef SM90_TMA_REDUCE_ADD
#undef SM90_TMA_REDUCE_ADD_2D
#undef SM90_TMA_REDUCE_ADD_3D
#undef SM90_TMA_REDUCE_ADD_4D
#undef SM90_TMA_REDUCE_ADD_5D
#undef SM90_BULK_COPY_G2S
#undef SM90_BULK_COPY_S2G
#undef tma_store_fence
#undef tma_store_arrive
#undef tma_store_wait

#include "hopper/bulk_copies.h"

namespace cute {

struct SM90_TMA_LOAD {
  template <class... Coordinates>
  static void copy(void const* map, uint64_t* barrier, uint64_t /*cache_hint*/, void* smem,
                   Coordinates... at) {
    simt::Box const box(map, smem, {static_cast<int32_t>(at)...});
    simt::bulk_loads().start(box, simt::smem_address(barrier));
  }

  struct PREFETCH {
    template <class... Coordinates>
    static void copy(void const* map, Coordinates...) {
      simt::TensorMap::at(map);
    }
  };
};
struct SM90_TMA_LOAD_2D : SM90_TMA_LOAD {};
struct SM90_TMA_LOAD_3D : SM90_TMA_LOAD {};
struct SM90_TMA_LOAD_4D : SM90_TMA_LOAD {};
struct SM90_TMA_LOAD_5D : SM90_TMA_LOAD {};

struct SM90_TMA_LOAD_MULTICAST {
  template <class... Coordinates>
  static void copy(void const* map, uint64_t* barrier, uint16_t blocks, uint64_t /*cache_hint*/,
                   void* smem, Coordinates... at) {
    simt::Box const box(map, smem, {static_cast<int32_t>(at)...});
    simt::start_multicast(box, simt::smem_address(barrier), blocks);
  }

  using PREFETCH = SM90_TMA_LOAD::PREFETCH;
};
struct SM90_TMA_LOAD_MULTICAST_2D : SM90_TMA_LOAD_MULTICAST {};
struct SM90_TMA_LOAD_MULTICAST_3D : SM90_TMA_LOAD_MULTICAST {};
struct SM90_TMA_LOAD_MULTICAST_4D : SM90_TMA_LOAD_MULTICAST {};
struct SM90_TMA_LOAD_MULTICAST_5D : SM90_TMA_LOAD_MULTICAST {};

struct SM90_TMA_STORE {
  template <class... Coordinates>
  static void copy(void const* map, void const* smem, Coordinates... at) {
    simt::Box const box(map, smem, {static_cast<int32_t>(at)...});
    simt::bulk_stores().start(box, simt::overwrite);
  }
};
struct SM90_TMA_STORE_2D : SM90_TMA_STORE {};
struct SM90_TMA_STORE_3D : SM90_TMA_STORE {};
struct SM90_TMA_STORE_4D : SM90_TMA_STORE {};
struct SM90_TMA_STORE_5D : SM90_TMA_STORE {};

struct SM90_TMA_REDUCE_ADD {
  template <class... Coordinates>
  static void copy(void const* map, void const* smem, Coordinates... at) {
    simt::Box const box(map, smem, {static_cast<int32_t>(at)...});
    simt::bulk_stores().start(box, simt::add_of(box.map.type));
  }
};
struct SM90_TMA_REDUCE_ADD_2D : SM90_TMA_REDUCE_ADD {};
struct SM90_TMA_REDUCE_ADD_3D : SM90_TMA_REDUCE_ADD {};
struct SM90_TMA_REDUCE_ADD_4D : SM90_TMA_REDUCE_ADD {};
struct SM90_TMA_REDUCE_ADD_5D : SM90_TMA_REDUCE_ADD {};

struct SM90_BULK_COPY_G2S {
  static void copy(void const* global, uint64_t* barrier, void* smem, int32_t bytes) {
    simt::bulk_loads().start(simt::Run(global, smem, bytes), simt::smem_address(barrier));
  }

  struct PREFETCH {
    static void copy(void const*, int32_t) {}
  };
};

struct SM90_BULK_COPY_S2G {
  static void copy(void const* smem, void* global, int32_t bytes) {
    simt::bulk_stores().start(simt::Run(global, smem, bytes), simt::overwrite);
  }
};

inline void tma_store_fence() { simt::fence_proxy_async(); }
inline void tma_store_arrive() { simt::bulk_stores().commit(); }

// Waits for the reads of shared memory only, as CuTe's does.
template <int kPending>
void tma_store_wait() {
  simt::bulk_stores().wait_read(kPending);
}

}  // namespace cute
