"""Helpers for tensors of programs that call other packages: ``maybe_contiguous`` and
``round_multiple`` are names of the 2.8 package."""

from __future__ import annotations

from torch import Tensor


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x, or a copy with a last stride of 1; None stays None."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def round_multiple(x: int, m: int) -> int:
    """The first multiple of m that is not below x."""
    return -(-x // m) * m


def into(buffer: Tensor | None, out: Tensor) -> Tensor:
    """out, in the caller's buffer if there is one."""
    if buffer is None:
        return out
    if buffer.shape != out.shape or buffer.dtype != out.dtype or buffer.device != out.device:
        raise ValueError(
            f"out: got {buffer.dtype} of shape {tuple(buffer.shape)} on {buffer.device}; "
            f"{out.dtype} of shape {tuple(out.shape)} on {out.device} is needed"
        )
    return buffer.copy_(out)
