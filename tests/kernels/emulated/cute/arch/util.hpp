// CuTe's header, but for the addresses of shared memory.
#pragma once

#define cast_smem_ptr_to_uint cast_smem_ptr_to_uint_gpu
#include_next <cute/arch/util.hpp>
#undef cast_smem_ptr_to_uint

#include "hopper/shared_memory.h"

namespace cute {

inline uint32_t cast_smem_ptr_to_uint(void const* pointer) { return simt::smem_address(pointer); }

}  // namespace cute
