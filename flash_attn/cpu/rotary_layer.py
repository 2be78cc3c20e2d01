"""The op `_rotary`: q and k turned by their positions, on torch operations.

What the CUDA kernel computes, to the bit, and what compilers and the transforms of torch.func
trace. The rotation that the cache call fuses is in `rotary`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _varlen_positions(total: int, cu_seqlens: Tensor, offsets: int | Tensor) -> Tensor:
    """Position of each of ``total`` packed tokens in its own sequence: (total,) int64."""
    token = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True)
    inside = sequence < cu_seqlens.shape[0] - 1
    # Tokens past cu_seqlens[-1] belong to no sequence; position 0 keeps them inside the table.
    sequence = torch.where(inside, sequence, 0)
    position = token - cu_seqlens[sequence]
    position = position + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)
    return torch.where(inside, position, 0)


def _check_positions(positions: Tensor, seqlen_ro: int) -> None:
    """Raises for positions that the tables lack, if reading them needs no wait or graph break."""
    if torch.compiler.is_compiling() or type(positions) is not Tensor:  # a tracer's: without data
        return
    if positions.device.type != "cpu" or not positions.numel():
        return
    first, last = (int(x) for x in positions.aminmax())
    if last >= seqlen_ro:
        raise ValueError(f"cos: got {seqlen_ro} positions; {last + 1} are needed")
    if first < 0:
        raise ValueError(f"seqlen_offsets: got a token at position {first}; 0 or more is needed")


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
        return cos.unsqueeze(-2), sin.unsqueeze(-2)
    if cu_seqlens is not None:
        positions = _varlen_positions(x.shape[0], cu_seqlens, seqlen_offsets)
    elif isinstance(seqlen_offsets, Tensor):
        step = torch.arange(x.shape[1], device=seqlen_offsets.device)
        positions = seqlen_offsets.unsqueeze(1) + step  # (batch, seqlen)
    else:
        rows = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
        return cos[None, rows, None], sin[None, rows, None]
    _check_positions(positions, cos.shape[0])
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


def rotary(
    out: Tensor, x: Tensor, out_k: Tensor | None, k: Tensor | None, out_rest: Tensor | None,
    rest: Tensor | None, cos: Tensor, sin: Tensor, cos_k: Tensor | None, sin_k: Tensor | None,
    offset: int, offsets: Tensor | None, cu_seqlens: Tensor | None, interleaved: bool,
    conjugate: bool,
) -> None:  # fmt: skip
    """x, k and rest (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim).

    x turns by cos and sin, k by tables of its own or the same ones; rest is copied. The outputs
    may be the inputs. Tables are as in ``rotary_angles``, in x's dtype or what it accumulates in.
    """
    places = (offset if offsets is None else offsets, cu_seqlens)
    cos_k, sin_k = (cos if cos_k is None else cos_k), (sin if sin_k is None else sin_k)
    for target, source, tables in ((out, x, (cos, sin)), (out_k, k, (cos_k, sin_k))):
        if source is None:
            continue
        angles = rotary_angles(source, *tables, *places)
        if target is not source:
            still = slice(2 * cos.shape[-1], None)
            target[..., still] = source[..., still]
        rotate_into(target, source, *angles, interleaved, conjugate)
    if rest is not None:
        out_rest.copy_(rest)
