"""One token a sequence through the gated delta rule, on torch operations: the state in place."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["EPSILON", "step"]

EPSILON = 1e-6  # beside the squares of a norm


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor,
    slots: Tensor | None, scale: float, normalizes: bool, of_sigmoid: float,
) -> Tensor:  # fmt: skip
    """q, k [B, HK, K], v [B, H, V], g and beta None or [B, H], state [slots, H, K, V]; slots [B]
    or None. o [B, H, V] in v's dtype; rows of negative slots are zeros."""
    compute = torch.promote_types(torch.promote_types(q.dtype, state.dtype), torch.float32)
    shared = v.shape[1] // k.shape[1] if k.shape[1] else 1
    q_, k_ = (_normal(x.to(compute), normalizes) for x in (q, k))
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


def _normal(x: Tensor, normalizes: bool) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() if normalizes else x
