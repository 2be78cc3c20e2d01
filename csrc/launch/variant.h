// A compiled kernel as the host sees it: its row in csrc/variants.py plus how to launch it.
#pragma once

#include <cuda_runtime.h>

#include <span>
#include <string_view>

#include "params/bwd_params.h"
#include "params/decode_params.h"

namespace flash {

struct DeviceInfo {
  int index;
  int sm;  // 10 * major + minor
  int64_t l2_bytes;
  int smem_per_block;
  int sm_count;
  float memory_rate = 0;  // bytes in a µs, by the datasheet; 0: unknown

  bool operator==(DeviceInfo const&) const = default;
};

// Where a launch goes, and the name of its kernel for messages.
struct LaunchContext {
  DeviceInfo const& device;
  cudaStream_t stream;
  char const* name;
};

// How to launch a row: the function that serves its direction (paged rows: forward; latent ones:
// decode); the others are null.
struct Launch {
  void (*forward)(FwdParams const&, LaunchContext const&);
  void (*backward)(BwdParams const&, LaunchContext const&);
  void (*decode)(DecodeParams const&, LaunchContext const&);
  void (*append)(AppendParams const&, LaunchContext const&);
};

// What a row computes. This is an enum because every call goes through the table, and comparing
// texts took 1.4 µs of a call to get to the rows of decode.
enum class Direction { Fwd, Bwd, Paged, Decode, Latent, Append };

constexpr char const* to_string(Direction direction) {
  constexpr char const* names[] = {"fwd", "bwd", "paged", "decode", "latent", "append"};
  return names[static_cast<int>(direction)];
}

struct Variant {
  char const* name;
  Direction direction;
  int arch;           // oldest compute capability of its family: 80, 90
  char const* dtype;  // "bf16", "fp16", "e4m3"
  int head_dim;
  int head_dim_v;
  int block_m;
  int block_n;
  int warps;
  int stages;
  char const* scores;  // "plain", "full"
  char const* why;
  int second_block_n;  // block_n of its second tile, a kernel of its own; 0: none
  int cached_bits;     // of the keys and values that it reads: 16, or 8 of codes
  int smem_bytes;
  int cluster;  // CTAs that share a tile
  Launch launch;

  bool is_plain() const { return std::string_view(scores) == "plain"; }
};

// All rows, in the table's order. Defined in the generated registry.
std::span<Variant const> variants();

}  // namespace flash
