"""Rotation of channel pairs by position-dependent angles, forward and inverse.

Rotary position embedding (Su et al. 2021, arXiv:2104.09864) turns the pair of channels (x1, x2)
at position p by the angle p * theta. The rotation is orthogonal, so its gradient is the rotation
by the opposite angle (``conjugate=True``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.api import checks
from flash_attn.api.checks_scalars import flag, integer
from flash_attn.api.warn import warn_once
from flash_attn.dispatch.rotary import Parts, Turn, rotate

__all__ = ["apply_rotary", "check_rotary", "make_turn"]


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless the tables fit the head dimension of ``x`` (..., heads, head_dim);
    TypeError where one of them is no tensor."""
    for name, given in (("x", x), ("cos", cos), ("sin", sin)):
        checks.tensor(given, name)
    if cos.shape != sin.shape:
        raise ValueError(
            f"sin: got shape {tuple(sin.shape)}; that of cos, {tuple(cos.shape)}, is needed"
        )
    if cos.dim() not in (2, 3):
        raise ValueError(
            f"cos: got shape {tuple(cos.shape)}; (seqlen_ro, rotary_dim / 2) is needed, or "
            "(batch, seqlen, rotary_dim / 2) with a row for each token"
        )
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos: got {cos.shape[-1]} columns, which rotate {2 * cos.shape[-1]} channels; at most "
            f"x's head dimension of {x.shape[-1]} is needed"
        )


def _check_rows(x: Tensor, cos: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raises unless a table with a row for each token fits x (batch, seqlen, ...)."""
    if cu_seqlens is not None:
        raise ValueError(
            f"cos: got shape {tuple(cos.shape)} with cu_seqlens; (seqlen_ro, rotary_dim / 2) is "
            "needed: a row for each position"
        )
    if cos.shape[0] not in (1, x.shape[0]) or cos.shape[1] != x.shape[1]:
        raise ValueError(
            f"cos: got shape {tuple(cos.shape)}; x {tuple(x.shape)} needs a row for each token, "
            f"({x.shape[0]}, {x.shape[1]}, rotary_dim / 2), or a table of positions, "
            "(seqlen_ro, rotary_dim / 2)"
        )


def _check_integers(x: Tensor, name: str) -> None:
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: got dtype {x.dtype}; int32 or int64 is needed")


def _check_cu_seqlens(cu_seqlens: Tensor) -> None:
    checks.tensor(cu_seqlens, "cu_seqlens")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}; (batch + 1,) is needed")
    _check_integers(cu_seqlens, "cu_seqlens")


def _check_places(
    x: Tensor, cos: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None
) -> None:
    """Checks what does not depend on values on the device; cos (seqlen_ro, ...)."""
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, Tensor):
        if seqlen_offsets.dim() != 1 or seqlen_offsets.shape[0] not in (1, batch):
            raise ValueError(
                f"seqlen_offsets: got shape {tuple(seqlen_offsets.shape)}; ({batch},) is needed"
            )
        _check_integers(seqlen_offsets, "seqlen_offsets")
    elif seqlen_offsets < 0:
        raise ValueError(f"seqlen_offsets: got {seqlen_offsets}; 0 or more is needed")
    elif cu_seqlens is None and seqlen_offsets + x.shape[1] > cos.shape[0]:
        raise ValueError(
            f"cos: got {cos.shape[0]} positions; {seqlen_offsets + x.shape[1]} are needed"
        )


def _without_gradient(*tables: Tensor | None) -> tuple[Tensor | None, ...]:
    if not torch.is_grad_enabled() or all(t is None or not t.requires_grad for t in tables):
        return tables
    if not torch.compiler.is_compiling():
        warn_once(
            "rotary embedding has no gradient in cos and sin: one of them requires a gradient and "
            "gets none"
        )
    return tuple(None if t is None else t.detach() for t in tables)


def make_turn(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
) -> Turn:
    """What turns ``x`` (batch, seqlen, ..., head_dim), or packed, after a look at the shapes."""
    interleaved = flag(interleaved, "interleaved")
    if not isinstance(seqlen_offsets, Tensor):
        seqlen_offsets = integer(seqlen_offsets, "seqlen_offsets")
    if cos_k is not None or sin_k is not None:
        cos_k, sin_k = (cos if cos_k is None else cos_k), (sin if sin_k is None else sin_k)
    for tables in ((cos, sin), (cos_k, sin_k)):
        if tables[0] is None:
            continue
        check_rotary(x, *tables)
        if tables[0].dim() == 3:
            _check_rows(x, tables[0], cu_seqlens)
        else:
            _check_places(x, tables[0], seqlen_offsets, cu_seqlens)
    cos, sin, cos_k, sin_k = _without_gradient(cos, sin, cos_k, sin_k)
    on_device = isinstance(seqlen_offsets, Tensor)
    offsets, offset = (seqlen_offsets, 0) if on_device else (None, seqlen_offsets)
    return Turn(cos, sin, cos_k, sin_k, offsets, cu_seqlens, offset=offset, interleaved=interleaved)


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
    turn = make_turn(
        x, cos, sin, interleaved=interleaved, seqlen_offsets=seqlen_offsets, cu_seqlens=cu_seqlens
    )
    inplace, conjugate = flag(inplace, "inplace"), flag(conjugate, "conjugate")
    with torch.no_grad():
        out = x if inplace else torch.empty_like(x)
        rotate(Parts(out), Parts(x), turn, conjugate)
    return out
