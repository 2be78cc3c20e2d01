"""A rotation of a call's tensors, and its gradient: which of their parts turn, in place or not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn.dispatch.autograd import records
from flash_attn.dispatch.rotary import Parts, Turn, rotate
from flash_attn.dispatch.run import traced

__all__ = [
    "differ_in_heads_alone",
    "of_grouped_qkv",
    "of_kv",
    "of_q_and_kv",
    "of_qkv",
    "rotate_all",
    "rotate_pair",
]

# The parts of a call's tensors that are rotated, as views. Each is a view of its own: autograd
# refuses to write into one of several views that come from a single unbind or split.
_Layout = Callable[..., Parts]


def of_qkv(qkv: Tensor) -> Parts:
    """(..., 3, heads, d)"""
    return Parts(qkv.select(-3, 0), qkv.select(-3, 1), qkv.select(-3, 2))


def of_grouped_qkv(num_heads_q: int, qkv: Tensor) -> Parts:
    """(..., num_heads_q + 2 * heads_k, d)"""
    heads_k = (qkv.shape[-2] - num_heads_q) // 2
    starts = (0, num_heads_q), (num_heads_q, heads_k), (num_heads_q + heads_k, heads_k)
    return Parts(*(qkv.narrow(-2, start, heads) for start, heads in starts))


def of_kv(kv: Tensor) -> Parts:
    """(..., 2, heads_k, d)"""
    return Parts(kv.select(-3, 0), None, kv.select(-3, 1))


def of_q_and_kv(q: Tensor, kv: Tensor) -> Parts:
    return Parts(q, kv.select(-3, 0), kv.select(-3, 1))


def _belongs_to_leaf(x: Tensor) -> bool:
    """Whether autograd forbids to write into x."""
    if not x.requires_grad or not torch.is_grad_enabled():
        return False
    return x.is_leaf or (x._base is not None and x._base.is_leaf)


def _turned(
    layout: _Layout, xs: tuple[Tensor, ...], turn: Turn, inplace: bool, conjugate: bool = False
) -> tuple[Tensor, ...]:
    parts = layout(*xs)
    if inplace:
        parts = parts._replace(rest=None)
        rotate(parts, parts, turn, conjugate)
        return xs
    outs = tuple(torch.empty_like(x) for x in xs)
    rotate(layout(*outs), parts, turn, conjugate)
    return outs


def _one_or_all(outs: tuple[Tensor, ...]):
    return outs if len(outs) > 1 else outs[0]


class _Rotate(torch.autograd.Function):
    """Keeps the tables and no x: the gradient is the opposite rotation."""

    @staticmethod
    def forward(ctx, layout: _Layout, turn: Turn, inplace, conjugate, leaves, *xs):
        *tensors, ctx.offset, ctx.interleaved = turn
        ctx.save_for_backward(*tensors)
        ctx.layout, ctx.conjugate = layout, conjugate
        if inplace:
            ctx.mark_dirty(*(x for x, is_leaf in zip(xs, leaves) if not is_leaf))
        outs = _turned(layout, xs, turn, inplace, conjugate)
        wanted = ctx.needs_input_grad[-len(xs) :]
        ctx.mark_non_differentiable(*(out for out, is_wanted in zip(outs, wanted) if not is_wanted))
        return _one_or_all(outs)

    @staticmethod
    def backward(ctx, *douts):
        # Not in place even for an in-place forward: `dout` may be a tensor of the caller's.
        douts = (d if d.stride(-1) == 1 else d.contiguous() for d in douts)
        turn = Turn(*ctx.saved_tensors, offset=ctx.offset, interleaved=ctx.interleaved)
        dxs = _Rotate.apply(ctx.layout, turn, False, not ctx.conjugate, (), *douts)
        return *(None,) * 5, *(dxs if isinstance(dxs, tuple) else (dxs,))


def rotate_all(layout: _Layout, xs: tuple[Tensor, ...], turn: Turn, inplace: bool = True):
    """One tensor for one x, else a tuple.

    A leaf that requires a gradient can be rotated in place as well: its gradient is that of the
    values it had, and what is returned, not the leaf, is the rotated tensor that autograd knows.
    """
    leaves = [inplace and _belongs_to_leaf(x) for x in xs]
    if traced():
        return _one_or_all(_rotate_traced(layout, xs, turn, inplace, leaves))
    if records(*xs):
        return _Rotate.apply(layout, turn, inplace, False, leaves, *xs)
    with torch.no_grad():
        return _one_or_all(_turned(layout, xs, turn, inplace))


def _rotate_traced(
    layout: _Layout, xs: tuple[Tensor, ...], turn: Turn, inplace: bool, leaves: list[bool]
) -> tuple[Tensor, ...]:
    outs = tuple(x if inplace and not leaf else x.clone() for x, leaf in zip(xs, leaves))
    _turned(layout, outs, turn, inplace=True)
    for x, out, is_leaf in zip(xs, outs, leaves):
        if is_leaf:
            with torch.no_grad():
                x.copy_(out)
    return outs


def differ_in_heads_alone(q: Tensor, k: Tensor) -> bool:
    return q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]


def rotate_pair(
    layout: _Layout, layout_k: _Layout, q: Tensor, k: Tensor, turn: Turn, inplace: bool
) -> tuple[Tensor, Tensor]:
    """q and k, or kv, in one launch where they can be."""
    # Autograd does not let a function of several results write into a view.
    if inplace and not traced() and records(q, k) and (q._is_view() or k._is_view()):
        own = turn._replace(cos=turn.cos_k, sin=turn.sin_k) if turn.cos_k is not None else turn
        return rotate_all(Parts, (q,), turn), rotate_all(layout_k, (k,), own)
    return rotate_all(layout, (q, k), turn, inplace)
