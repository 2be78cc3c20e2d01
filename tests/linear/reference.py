"""Linear attention by its definition: float64, token by token, with torch's own autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float,
    state: Tensor | None = None, cu_seqlens: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k [B, T, HK, K], v [B, T, H, V], g None, [H], [B, T, H] or [B, T, H, K] in float64 ->
    o [B, T, H, V], zeros at tokens of no sequence, and the final state [N, H, K, V]."""

    def step(S: Tensor, k: Tensor, t: int) -> Tensor:
        return S * factor(g, t) + k[..., None] * v[:, t, :, None, :]

    return _walk(step, q, k, v, scale, state, cu_seqlens)


def factor(g: Tensor | None, t: int) -> Tensor | float:
    """What the state is multiplied by at token t."""
    if g is None:
        return 1.0
    if g.dim() == 1:
        return g.exp()[None, :, None, None]
    return g[:, t].exp()[(..., None) if g.dim() == 4 else (..., None, None)]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    state: Tensor | None = None, cu_seqlens: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule: q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV]."""

    def step(S: Tensor, k: Tensor, t: int) -> Tensor:
        S = S * g[:, t].exp()[..., None, None]
        old = (k[..., None, :] @ S).squeeze(-2)
        new = beta[:, t, :, None] * (v[:, t] - old)
        return S + k[..., None] * new[:, :, None, :]

    return _walk(step, q, k, v, scale, state, cu_seqlens)


def _walk(
    step: Callable[[Tensor, Tensor, int], Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float,
    state: Tensor | None, cu_seqlens: list[int] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sequence by sequence and token by token; step: the state before a token, the token's key
    [B, H, K] and where it is -> the state after it."""
    heads, shared = v.shape[2], v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
    packed = cu_seqlens is not None
    edges = cu_seqlens if packed else [0, v.shape[1]]
    sequences = len(edges) - 1 if packed else len(v)
    if state is None:
        state = v.new_zeros(sequences, heads, q.shape[-1], v.shape[-1])
    outputs, finals = [v.new_zeros(v.shape[0], *v.shape[2:])] * v.shape[1], []
    for n, (start, end) in enumerate(itertools.pairwise(edges)):
        S = state[n : n + 1] if packed else state
        for t in range(start, end):
            S = step(S, k[:, t], t)
            outputs[t] = scale * (q[:, t, :, None, :] @ S).squeeze(-2)
        finals.append(S)
    return torch.stack(outputs, 1) if outputs else v * 1, torch.cat(finals)
