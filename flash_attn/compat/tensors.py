"""Helpers of the 2.8 package that programs import from ``flash_attn.flash_attn_interface``."""

from __future__ import annotations

from torch import Tensor


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x, or a copy with a last stride of 1; None stays None."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def round_multiple(x: int, m: int) -> int:
    """The first multiple of m that is not below x."""
    return -(-x // m) * m
