#include "api/rng.h"

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

}  // namespace flash::api
