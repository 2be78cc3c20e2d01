// FLASH_ATTN_LOG=1: one line on stderr for each new (problem, variant).
#pragma once

#include "core/last_rows.h"
#include "host/variant.h"

namespace flash {

void trace_launch(FwdParams const& params, Variant const& variant, LastRows const& last = {});
void trace_launch(BwdParams const& params, Variant const& variant);

}  // namespace flash
