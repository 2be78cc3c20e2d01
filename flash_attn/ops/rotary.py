"""Rotation of channel pairs by position-dependent angles, forward and inverse.

Rotary position embedding (Su et al. 2021, arXiv:2104.09864) turns the pair of channels (x1, x2)
at position p by the angle p * theta. The rotation is orthogonal, so its gradient is the rotation
by the opposite angle (``conjugate=True``).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rotary", "check_rotary", "rotary_angles", "rotate_into"]


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless the tables fit the head dimension of ``x`` (..., heads, head_dim)."""
    if cos.shape != sin.shape:
        raise ValueError(
            f"sin has shape {tuple(sin.shape)}, cos has {tuple(cos.shape)}: they differ"
        )
    if cos.dim() not in (2, 3):
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}; (seqlen_ro, rotary_dim / 2) is needed, or "
            "(batch, seqlen, rotary_dim / 2) with a row for each token"
        )
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos has {cos.shape[-1]} columns, which rotate {2 * cos.shape[-1]} channels, "
            f"but x has a head dimension of {x.shape[-1]}"
        )


def _check_rows(x: Tensor, cos: Tensor, cu_seqlens: Tensor | None) -> None:
    """That a table with a row for each token fits x (batch, seqlen, ...)."""
    if cu_seqlens is not None:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)} with cu_seqlens; (seqlen_ro, rotary_dim / 2) is "
            "needed: a row for each position"
        )
    if cos.shape[0] not in (1, x.shape[0]) or cos.shape[1] != x.shape[1]:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}; x {tuple(x.shape)} needs a row for each token, "
            f"({x.shape[0]}, {x.shape[1]}, rotary_dim / 2), or a table of positions, "
            "(seqlen_ro, rotary_dim / 2)"
        )


def _varlen_positions(total: int, cu_seqlens: Tensor, offsets: int | Tensor) -> Tensor:
    """Position of each of ``total`` packed tokens in its own sequence: (total,) int64."""
    token = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True)
    inside = sequence < cu_seqlens.shape[0] - 1
    # Tokens past cu_seqlens[-1] belong to nobody; position 0 keeps them inside the table.
    sequence = torch.where(inside, sequence, 0)
    position = token - cu_seqlens[sequence]
    position = position + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)
    return torch.where(inside, position, 0)


def rotary_angles(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rows of the tables that the tokens of ``x`` need, broadcastable over heads.

    Args:
        x: (batch, seqlen, ..., head_dim), or (total, ..., head_dim) with ``cu_seqlens``.
        cos, sin: (seqlen_ro, rotary_dim / 2), or one row per token already:
            (batch, seqlen, rotary_dim / 2).
        seqlen_offsets: first position, an int or (batch,).
        cu_seqlens: (batch + 1,) int32, or None.

    Returns:
        cos, sin: (1 or batch, seqlen, 1, rotary_dim / 2), or (total, 1, rotary_dim / 2).
    """
    if cos.dim() == 3:
        _check_rows(x, cos, cu_seqlens)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)
    seqlen_ro = cos.shape[0]
    if cu_seqlens is not None:
        positions = _varlen_positions(x.shape[0], cu_seqlens, seqlen_offsets)
    elif isinstance(seqlen_offsets, Tensor):
        step = torch.arange(x.shape[1], device=seqlen_offsets.device)
        positions = seqlen_offsets.unsqueeze(1) + step  # (batch, seqlen)
    else:
        end = seqlen_offsets + x.shape[1]
        if end > seqlen_ro:
            raise ValueError(f"cos has {seqlen_ro} positions; this call needs {end}")
        rows = slice(seqlen_offsets, end)
        return cos[None, rows, None], sin[None, rows, None]
    # Values are read where that costs no synchronisation and no graph break.
    readable = positions.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and positions.numel() and int(positions.max()) >= seqlen_ro:
        raise ValueError(
            f"cos has {seqlen_ro} positions; this call needs {int(positions.max()) + 1}"
        )
    return cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)


def _pair(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The two channels of every rotated pair, as views (..., rotary_dim / 2)."""
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def rotate_into(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool = False
) -> None:
    """Write the rotated channels of ``x`` (..., head_dim) to ``out``, which may be ``x`` itself.

    ``cos`` and ``sin`` are rows from ``rotary_angles``. Channels past rotary_dim are not touched.
    """
    half = cos.shape[-1]
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(compute), sin.to(compute)
    if conjugate:
        sin = -sin
    first, second = (t.to(compute) for t in _pair(x, half, interleaved))
    out_first, out_second = _pair(out, half, interleaved)
    # Both are computed before either is written: `out` and `x` may be one tensor.
    rotated_first, rotated_second = first * cos - second * sin, first * sin + second * cos
    out_first.copy_(rotated_first)
    out_second.copy_(rotated_second)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate the first ``rotary_dim`` channels of every head; not recorded by autograd.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with ``cu_seqlens``.
        cos, sin: (seqlen_ro, rotary_dim / 2) in any floating dtype.
        seqlen_offsets: position of the first token, an int or (batch,).
        cu_seqlens: (batch + 1,) int32 where sequences are packed.
        max_seqlen: accepted for the drop-in; the positions follow from ``cu_seqlens``.
        interleaved: pairs are channels (0, 1), (2, 3), ...; else (0, r/2), (1, r/2 + 1), ...
        inplace: write into ``x`` and return it.
        conjugate: rotate back.

    Returns:
        the shape and dtype of ``x``; the arithmetic is fp32 (fp64 for fp64).
    """
    check_rotary(x, cos, sin)
    with torch.no_grad():
        cos, sin = rotary_angles(x, cos, sin, seqlen_offsets, cu_seqlens)
        out = x if inplace else x.clone()
        rotate_into(out, x, cos, sin, interleaved, conjugate)
    return out
