// Comes before the sources of csrc/api: what they register for CUDA tensors is registered for CPU
// tensors, under names of its own.
#pragma once

#include <torch/csrc/stable/library.h>

#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(ns, key, library) \
  _STABLE_TORCH_LIBRARY_IMPL(flash_attn_host, CPU, library, C10_UID)
