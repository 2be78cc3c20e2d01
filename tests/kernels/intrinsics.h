// CUDA's vocabulary for the threads of simt.h: enough of it to compile the kernels of csrc/
// unchanged with a host compiler.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "simt.h"

#undef __device__
#undef __global__
#undef __shared__
#undef __align__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

// Named in parts of CUTLASS's headers that the kernels do not use.
int __dp4a(int, int, int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
template <class A, class B, class C>
A __hfma2(A, B, C);

inline void __syncthreads() { simt::wait(simt::block->barrier); }

inline int __syncthreads_or(int condition) {
  simt::Block& block = *simt::block;
  block.any |= condition != 0;
  __syncthreads();
  bool const any = block.any;
  __syncthreads();
  block.any = false;
  __syncthreads();
  return any;
}

// ---- warps: all lanes take part -----------------------------------------------------------------

namespace simt {

constexpr unsigned kAllLanes = 0xffffffff;

// What lane `source` shows.
template <class T>
T shuffle(unsigned lanes, T value, int source) {
  expect(lanes == kAllLanes, "a shuffle of some lanes only is not emulated");
  T result;
  exchange({value}, [&](auto of) { result = *of(source); });
  return result;
}

inline unsigned ballot(unsigned lanes, bool mine) {
  expect(lanes == kAllLanes, "a vote of some lanes only is not emulated");
  unsigned votes = 0;
  exchange({mine}, [&](auto of) {
    for (int l = 0; l < kWarp; ++l) {
      votes |= unsigned{*of(l)} << l;
    }
  });
  return votes;
}

}  // namespace simt

inline unsigned __reduce_add_sync(unsigned lanes, unsigned mine) {
  simt::expect(lanes == simt::kAllLanes, "a sum over some lanes only is not emulated");
  unsigned sum = 0;
  simt::exchange({mine}, [&](auto of) {
    for (int l = 0; l < simt::kWarp; ++l) {
      sum += *of(l);
    }
  });
  return sum;
}

// The largest among the lanes that name the same ones, themselves included.
inline int __reduce_max_sync(unsigned lanes, int mine) {
  int most = mine;
  simt::exchange({std::pair(lanes, mine)}, [&](auto of) {
    simt::expect(lanes >> simt::lane() & 1, "a lane does not name itself");
    for (int l = 0; l < simt::kWarp; ++l) {
      if (lanes >> l & 1) {
        simt::expect(of(l)->first == lanes, "lanes of a maximum name different lanes");
        most = std::max(most, of(l)->second);
      }
    }
  });
  return most;
}

// The lanes with the same number.
inline unsigned __match_any_sync(unsigned lanes, int mine) {
  simt::expect(lanes == simt::kAllLanes, "a match of some lanes only is not emulated");
  unsigned same = 0;
  simt::exchange({mine}, [&](auto of) {
    for (int l = 0; l < simt::kWarp; ++l) {
      same |= unsigned{*of(l) == mine} << l;
    }
  });
  return same;
}

inline void __syncwarp(unsigned lanes = simt::kAllLanes) {
  simt::expect(lanes == simt::kAllLanes, "__syncwarp of some lanes only is not emulated");
  simt::wait(simt::warp().barrier);
}

template <class T>
T __shfl_sync(unsigned lanes, T value, int source) {
  return simt::shuffle(lanes, value, source % simt::kWarp);
}

template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int lane_mask) {
  return simt::shuffle(lanes, value, simt::lane() ^ lane_mask);
}

// Lanes without a partner keep their own value.
template <class T>
T __shfl_up_sync(unsigned lanes, T value, int distance) {
  int const source = simt::lane() - distance;
  return simt::shuffle(lanes, value, source < 0 ? simt::lane() : source);
}

template <class T>
T __shfl_down_sync(unsigned lanes, T value, int distance) {
  int const source = simt::lane() + distance;
  return simt::shuffle(lanes, value, source >= simt::kWarp ? simt::lane() : source);
}

inline unsigned __ballot_sync(unsigned lanes, bool mine) { return simt::ballot(lanes, mine); }
inline bool __any_sync(unsigned lanes, bool mine) { return simt::ballot(lanes, mine) != 0; }
inline bool __all_sync(unsigned lanes, bool mine) {
  return simt::ballot(lanes, mine) == simt::kAllLanes;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// ---- memory -------------------------------------------------------------------------------------

// Threads switch only where they wait.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { simt::poll(); }

template <class T>
T __ldg(T const* address) {
  return *address;
}

template <class T>
T __ldcg(T const* address) {
  return *address;
}

template <class T>
T atomicAdd(T* address, T value) {
  return std::exchange(*address, *address + value);
}

template <class T>
T atomicMax(T* address, T value) {
  return std::exchange(*address, *address < value ? value : *address);
}

template <class T>
T atomicMin(T* address, T value) {
  return std::exchange(*address, value < *address ? value : *address);
}

template <class T>
T atomicExch(T* address, T value) {
  return std::exchange(*address, value);
}

template <class T>
T atomicCAS(T* address, T compare, T value) {
  return std::exchange(*address, *address == compare ? value : *address);
}

inline unsigned atomicInc(unsigned* address, unsigned last) {
  return std::exchange(*address, *address >= last ? 0 : *address + 1);
}
