#pragma once

namespace flash {

// What a kernel can do to scores. Plain: scale and mask limits. Full: softcap, ALiBi and dropout
// as well, at the price of registers in the inner loop. Sinks join a row when it is finished, at
// either level.
enum class ScoreLevel { Plain, Full };

}  // namespace flash
