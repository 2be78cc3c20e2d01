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

namespace {

constexpr int64_t kGenerator = 2;  // seed, offset
constexpr int64_t kOrigin = sizeof(DropoutOrigin) / sizeof(int64_t);

}  // namespace

Tensor checked_rng_state(Tensor const& rng_state, int batch, Tensor const& q) {
  check_on_device_of(rng_state, "rng_state", q);
  int64_t const size = rng_state.numel();
  require(rng_state.scalar_type() == ScalarType::Long && rng_state.dim() == 1 &&
              (size == kGenerator || size == kGenerator + kOrigin * batch),
          "rng_state", "vector", "int64", "2, or 2 + 3 * batch,");
  return rng_state.is_contiguous() ? rng_state : torch::stable::clone(rng_state);
}

DropoutOrigin const* dropout_origins(Tensor const& rng_state) {
  auto const* numbers = static_cast<int64_t const*>(rng_state.data_ptr());
  return rng_state.numel() == kGenerator
             ? nullptr
             : reinterpret_cast<DropoutOrigin const*>(numbers + kGenerator);
}

}  // namespace flash::api
