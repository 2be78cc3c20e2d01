"""How far a result may be from the reference."""

from __future__ import annotations

import torch
from torch import Tensor

# Half a last digit of a result's own dtype.
HALF_DIGIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
# A share of the sum of all terms' magnitudes: sums in fp32, and decays of long spans.
SUMS = 2.0**-17
# Compiled kernels round terms twice, to 16 bits (tests/linear/rounding.py).
KERNEL_SUMS = {torch.bfloat16: 2.0**-7 + 2.0**-15, torch.float16: 2.0**-8 + 2.0**-10}
# As small as a term in fp32 may be that is lost, and as a number of fp16 may be.
_TINY = {torch.float16: 2.0**-24}


def assert_close(
    got: Tensor, want: Tensor, magnitude: Tensor, name: str, sums: float = SUMS, lost: float = 0.0
) -> None:
    """``got`` is the float64 ``want``, but for rounding: each element by itself.

    magnitude: the same sums, of the absolute values of all their terms: what cancels is allowed
    the error of what it is made of, and no more. lost: of terms that are too small for their dtype.
    """
    sums = 2.0**-44 if got.dtype == torch.float64 else sums
    allowed = HALF_DIGIT[got.dtype] * want.abs() + sums * magnitude.abs()
    hold(name, got, want, allowed + _TINY.get(got.dtype, 1e-32) + lost)


def hold(name: str, got: Tensor, want: Tensor, allowed: Tensor) -> None:
    """``got`` is the float64 ``want``, but for what is allowed of each element."""
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, not {tuple(want.shape)}"
    if not want.numel():
        return
    got = got.double().cpu()
    assert torch.isfinite(got).all(), f"{name}: not finite"
    share = (got - want).abs() / allowed
    at = int(share.argmax())
    assert share.max() <= 1, (
        f"{name}: {got.flatten()[at].item()}, not {want.flatten()[at].item()}: {share.max():.3g} "
        f"times the error that is allowed, at {at} of {tuple(got.shape)}"
    )
