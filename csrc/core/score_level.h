#pragma once

namespace flash {

// What a kernel can do to scores. Plain: scale and mask limits. Full: softcap, ALiBi, sinks and
// dropout as well, at the price of registers in the inner loop.
enum class ScoreLevel { Plain, Full };

}  // namespace flash
