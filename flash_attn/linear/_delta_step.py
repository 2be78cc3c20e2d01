"""The gated delta rule and single tokens, on torch operations: norms, and a step in place."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["normalized", "normalized_backward", "step"]

_EPSILON = 1e-6  # beside the squares of a norm


def normalized(x: Tensor) -> Tensor:
    """x over its norm, sums in fp32; x [..., K]."""
    return (_wide(x) * _inverse_norm(x)).to(x.dtype)


def normalized_backward(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of x, from that of ``normalized(x)``."""
    wide, factor, dy = _wide(x), _inverse_norm(x), dy.to(_wide(x).dtype)
    along = (wide * dy).sum(-1, keepdim=True)
    return (factor * dy - wide * factor**3 * along).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _inverse_norm(x: Tensor) -> Tensor:
    return (_wide(x).square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor,
    slots: Tensor | None, scale: float, normalizes: bool, of_sigmoid: float,
) -> Tensor:  # fmt: skip
    """q, k [B, HK, K], v [B, H, V], g and beta None or [B, H], state [slots, H, K, V]; slots [B]
    or None. o [B, H, V] in v's dtype; rows of negative slots are zeros."""
    compute = torch.promote_types(torch.promote_types(q.dtype, state.dtype), torch.float32)
    shared = v.shape[1] // k.shape[1] if k.shape[1] else 1
    q_, k_ = (x.to(compute) for x in (q, k))
    if normalizes:
        q_, k_ = normalized(q_), normalized(k_)
    q_, k_ = (x.repeat_interleave(shared, dim=1) for x in (q_ * scale, k_))
    at = torch.arange(len(v), device=v.device) if slots is None else slots.long()
    live = at >= 0
    S = state[at.clamp(min=0)].to(compute)
    if g is not None:
        S = S * g.to(compute).exp()[..., None, None]
    u = v.to(compute) - (k_[..., None] * S).sum(-2)
    if beta is not None:
        factor = beta.to(compute)
        u = u * (of_sigmoid * factor.sigmoid() if of_sigmoid else factor)[..., None]
    S = S + k_[..., None] * u[..., None, :]
    o = (q_[..., None] * S).sum(-2)
    state[at[live]] = S[live].to(state.dtype)
    return o.masked_fill(~live[:, None, None], 0).to(v.dtype)
