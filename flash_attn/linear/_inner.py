"""Inside a chunk: decays of spans of tokens, and the products that need no state.

All tensors are [chunks, H, C, ...]; a gate has X columns, 1 (a scalar) or K (a vector). A decay is
the exponential of a sum of log gates, all of which are <= 0 and none of which is subtracted: no
factor exceeds 1, small gates keep their digits beside large ones, and -inf gives exact zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_attn.linear._table import lower

__all__ = ["Decays", "crossing", "decays", "intra", "intra_backward", "sum_before", "sum_from"]


class Decays(NamedTuple):
    """What gates make of what lies between two places of a chunk."""

    between: Tensor  # [.., i, j, X] from token j to token i; 0 where i < j
    from_start: Tensor  # [.., i, X] from the chunk's initial state to token i
    to_end: Tensor  # [.., j, X] from token j to the chunk's final state
    total: Tensor  # [.., 1, X] from the initial to the final state


def decays(g: Tensor) -> Decays:
    """g [.., C, X] -> the decays of a chunk."""
    size = g.shape[-2]
    later = lower(size, -1, g.device)[..., None]
    spans = torch.where(later, g[..., :, None, :], 0).cumsum(-3)
    between = spans.exp_().masked_fill(~lower(size, 0, g.device)[..., None], 0)
    from_start = g.cumsum(-2).exp_()
    return Decays(between, from_start, between[..., -1, :, :], from_start[..., -1:, :])


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
    before = sum_before(pairs)
    return before.masked_fill(~lower(pairs.shape[-2], 0, pairs.device)[..., None], 0).sum(-3)


def sum_before(x: Tensor) -> Tensor:
    """[.., C, X] -> [.., t, X]: the sum over j < t."""
    return F.pad(x.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))


def sum_from(x: Tensor) -> Tensor:
    """[.., C, X] -> [.., t, X]: the sum over i >= t."""
    return x.flip(-2).cumsum(-2).flip(-2)
