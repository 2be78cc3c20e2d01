"""Inside a chunk: decays of spans of tokens, and the products that need no state.

All tensors are [chunks, H, C, ...]; a gate has X columns, 1 (a scalar) or K (a vector). A decay is
the exponential of a sum of log gates, all of which are <= 0 and none of which is subtracted: no
factor exceeds 1, small gates keep their digits beside large ones, and -inf gives exact zeros.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_attn.linear._table import lower

__all__ = ["Decays", "crossing", "decays", "intra", "intra_backward", "sum_before", "sum_from"]


# A log gate whose exponential is 0 in fp32 and fp64, and whose product with 0 is 0.
_CLOSED = -1e4
_AXES = ((-1, 1, 1), (1, -1, 1), (1, 1, -1))


class Decays(NamedTuple):
    """What gates make of what lies between two places of a chunk."""

    between: Tensor  # [.., i, j, X] from token j to token i; 0 where i < j
    from_start: Tensor  # [.., i, X] from the chunk's initial state to token i
    to_end: Tensor  # [.., j, X] from token j to the chunk's final state
    total: Tensor  # [.., 1, X] from the initial to the final state


def decays(g: Tensor) -> Decays:
    """g [.., C, X] -> the decays of a chunk."""
    size, g = g.shape[-2], g.clamp(min=_CLOSED)
    terms = _terms(size, g.dtype, g.device)
    spans = terms @ g if g.shape[-1] > 1 else (g.mT @ terms.mT).mT
    between = spans.unflatten(-2, (size, size)).exp_()
    between.masked_fill_(~lower(size, 0, g.device)[..., None], 0)
    from_start = g.cumsum(-2).exp_()
    return Decays(between, from_start, between[..., -1, :, :], from_start[..., -1:, :])


@functools.cache
def _terms(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[size * size, size]: 1 for the gates that span (i, j) adds, those of tokens j + 1 to i."""
    i, j, t = (torch.arange(size, device=device).view(shape) for shape in _AXES)
    return ((j < t) & (t <= i)).to(dtype).flatten(0, 1)


def intra(q: Tensor, k: Tensor, between: Tensor) -> Tensor:
    """A [.., i, j]: what o_i takes of v_j; zero above the diagonal."""
    if between.shape[-1] == 1:
        return (q @ k.mT) * between.squeeze(-1)
    return ((between * k[..., None, :, :]) @ q[..., None]).squeeze(-1)


def intra_backward(
    q: Tensor, k: Tensor, between: Tensor, dA: Tensor, with_dg: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dq, dk and dg of ``intra``, from the gradient of A [.., i, j]."""
    if between.shape[-1] == 1:
        dscores = dA * between.squeeze(-1)
        pairs = (dscores * (q @ k.mT))[..., None] if with_dg else None
        dq, dk = dscores @ k, dscores.mT @ q
    else:
        dscores = dA[..., None] * between
        of_q, of_k = dscores * k[..., None, :, :], dscores * q[..., :, None, :]
        pairs = of_q * q[..., :, None, :] if with_dg else None
        dq, dk = of_q.sum(-2), of_k.sum(-3)
    return dq, dk, None if pairs is None else crossing(pairs)


def crossing(pairs: Tensor) -> Tensor:
    """[.., i, j, X] -> [.., t, X]: the sum over i >= t > j, of the pairs that token t's gate is
    between. All that it adds belongs to the sum: nothing cancels."""
    size, device = pairs.shape[-2], pairs.device
    earlier = lower(size, -1, device).to(pairs.dtype)
    if pairs.shape[-1] > 1:
        before = earlier @ pairs
    else:
        before = (pairs.squeeze(-1) @ earlier.mT)[..., None]
    return before.masked_fill_(~lower(size, 0, device)[..., None], 0).sum(-3)


def sum_before(x: Tensor) -> Tensor:
    """[.., C, X] -> [.., t, X]: the sum over j < t."""
    return F.pad(x.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))


def sum_from(x: Tensor) -> Tensor:
    """[.., C, X] -> [.., t, X]: the sum over i >= t."""
    return x.flip(-2).cumsum(-2).flip(-2)
