#include "api/rng.h"

#include <torch/csrc/stable/ops.h>

#include <array>

namespace flash::api {

Tensor draw_rng_state(Tensor const& q) {
  // random_(Tensor(a!) self, *, Generator? generator=None) -> Tensor(a!)
  std::array<StableIValue, 2> stack{torch::stable::detail::from(empty(q, {2}, ScalarType::Long)),
                                    torch::stable::detail::from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::random_", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor checked_rng_state(Tensor const& rng_state, Tensor const& q) {
  check_on_device_of(rng_state, "rng_state", q);
  check(
      rng_state.scalar_type() == ScalarType::Long && rng_state.dim() == 1 && rng_state.size(0) == 2,
      "rng_state must be an int64 tensor of 2 entries");
  return rng_state.is_contiguous() ? rng_state : torch::stable::clone(rng_state);
}

}  // namespace flash::api
