"""One token a sequence, on torch operations: the state is read, decayed and written in place."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["step"]


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, slots: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """q, k [B, HK, K], v [B, H, V], g None, [H], [B, H] or [B, H, K], state [slots, H, K, V];
    slots [B] or None. o [B, H, V] in v's dtype; rows of negative slots are zeros."""
    compute = torch.promote_types(torch.promote_types(q.dtype, state.dtype), torch.float32)
    shared = v.shape[1] // k.shape[1] if k.shape[1] else 1
    q_, k_ = (x.to(compute).repeat_interleave(shared, dim=1) for x in (q, k))
    at = torch.arange(len(v), device=v.device) if slots is None else slots.long()
    is_row = (at >= 0)[:, None, None]
    S = state[at.clamp(min=0)].to(compute)
    if g is not None:
        S = S * _factors(g, v).to(compute).exp()
    S = S + k_[..., None] * v.to(compute)[..., None, :]
    o = ((q_ * scale)[..., None] * S).sum(-2)
    live = at >= 0
    state[at[live]] = S[live].to(state.dtype)
    return o.masked_fill(~is_row, 0).to(v.dtype)


def _factors(g: Tensor, v: Tensor) -> Tensor:
    """[B or 1, H, K or 1, 1], log."""
    if g.dim() == 1:
        return g[None, :, None, None]
    return g[..., None] if g.dim() == v.dim() else g[..., None, None]
