// CuTe's header, but for the prefetch of a tensor map.
#pragma once

#define prefetch_tma_descriptor prefetch_tma_descriptor_gpu
#include_next <cute/arch/copy_sm90_desc.hpp>
#undef prefetch_tma_descriptor

#include "hopper/tensor_map.h"

namespace cute {

inline void prefetch_tma_descriptor(TmaDescriptor const* map) { simt::TensorMap::at(map); }

}  // namespace cute
