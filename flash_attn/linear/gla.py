"""Gated linear attention (Yang et al. 2024): a decay for each row of the state."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from flash_attn.linear import _checks
from flash_attn.linear.core import chunk_scan, recurrent_scan

__all__ = ["chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"]


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention: see ``chunk_scan``.

    Arguments:
        q, k: [B, T, HK, K]; v: [B, T, H, V]; g: log decay [B, T, H, K] in [-inf, 0].
        cu_seqlens_cpu: accepted and not needed.

    Returns:
        o [B, T, H, V] and the final state or None.

    Raises:
        ValueError, TypeError: as ``chunk_scan``.
    """
    _four("g", g)
    return chunk_scan(
        q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )


#: The same: no mode is slower or less exact than another.
fused_chunk_gla = chunk_gla


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention for few tokens, with decays of the state's rows and columns.

    Arguments:
        q, k: [B, T, HK, K]; v: [B, T, H, V].
        gk, gv: log decays [B, T, H, K] and [B, T, H, V]; None is no decay. gv runs token by token
            on torch operations, whatever the device.
        reverse: from each sequence's last token to its first.

    Returns:
        o [B, T, H, V] and the final state or None.

    Raises:
        ValueError, TypeError: as ``chunk_scan``.
    """
    if gk is not None:
        _four("gk", gk)
    if gv is None:
        return recurrent_scan(
            q, k, v, gk, scale, initial_state, output_final_state, reverse, state_v_first,
            cu_seqlens,
        )  # fmt: skip
    _checks.operands(q, k, v)
    _checks.shape("gv", gv, ("v's", tuple(v.shape)))
    if gk is not None:
        _checks.shape("gk", gk, ("[B, T, H, K]", (*v.shape[:3], k.shape[-1])))
    cu_seqlens = _checks.cu_seqlens_of(cu_seqlens, v)
    state = _checks.state_of(initial_state, k, v, cu_seqlens, state_v_first)
    scale = _checks.scale_of(scale, k.shape[-1])
    o, final = _by_token(q * scale, k, v, gk, gv, state, cu_seqlens, reverse)
    if not output_final_state:
        return o, None
    return o, final.mT.contiguous() if state_v_first else final


def _four(name: str, g: Tensor) -> None:
    if not isinstance(g, Tensor) or g.dim() != 4:
        raise ValueError(f"{name}: a tensor [B, T, H, K] is needed")


def _by_token(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None, gv: Tensor, state: Tensor | None,
    cu_seqlens: Tensor | None, reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All sequences one after the other; of a batch, all entries at a time."""
    compute = torch.promote_types(v.dtype, torch.float32)
    shared = v.shape[2] // k.shape[2]
    q_, k_ = (x.to(compute).repeat_interleave(shared, dim=2) for x in (q, k))
    v_, factors = v.to(compute), gv.to(compute).exp()[..., None, :]
    if gk is not None:
        factors = factors * gk.to(compute).exp()[..., None]
    sequences = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if state is None:
        state = v_.new_zeros(sequences, v.shape[2], k.shape[-1], v.shape[-1])
    edges = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs: list[Tensor] = [v_.new_zeros(v.shape[0], *v.shape[2:])] * v.shape[1]
    finals = []
    for n, (start, end) in enumerate(itertools.pairwise(edges)):
        S = state if cu_seqlens is None else state[n : n + 1]
        for t in reversed(range(start, end)) if reverse else range(start, end):
            S = S * factors[:, t] + k_[:, t, :, :, None] * v_[:, t, :, None, :]
            outputs[t] = (q_[:, t, :, :, None] * S).sum(-2)
        finals.append(S)
    o = torch.stack(outputs, 1) if outputs else v_.new_zeros(v.shape)
    return o.to(v.dtype), torch.cat(finals) if finals else state
