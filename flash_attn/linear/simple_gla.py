"""Scalar decay: simple GLA, retention and lightning attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn.linear.core import chunk_scan, recurrent_scan

__all__ = [
    "chunk_lightning_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
]


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one decay a head: see ``chunk_scan``.

    Arguments:
        q, k: [B, T, HK, K]; v: [B, T, H, V].
        g: log decay [B, T, H]; g_gamma: log decay [H] of every token. Both add up; neither is none.
        cu_seqlens_cpu, chunk_size: accepted and not needed; a chunk size is a power of 2.

    Returns:
        o [B, T, H, V] and the final state or None.

    Raises:
        ValueError, TypeError: as ``chunk_scan``.
    """
    check_chunk_size(chunk_size)
    g = _decay(v, g, g_gamma)
    return chunk_scan(
        q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_simple_gla`` for few tokens; with ``reverse`` from the last token to the first."""
    g = _decay(v, g, g_gamma)
    return recurrent_scan(
        q, k, v, g, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens
    )


def check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is None:
        return
    if type(chunk_size) is not int or chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size: got {chunk_size!r}; a power of 2 is needed")


def _decay(v: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    if g is not None and g.dim() != 3:
        raise ValueError(f"g: got shape {tuple(g.shape)}; [B, T, H] is needed")
    if g_gamma is None:
        return g
    if tuple(g_gamma.shape) != (v.shape[2],):
        raise ValueError(f"g_gamma: got shape {tuple(g_gamma.shape)}; [H], {v.shape[2]}, is needed")
    return g_gamma if g is None else g + g_gamma


def _retention_decay(heads: int) -> list[float]:
    """Log decays of retention's heads (Sun et al. 2023): 1 - 2^(-5 - h)."""
    return [math.log1p(-(2.0 ** (-5 - h))) for h in range(heads)]


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Retention (Sun et al. 2023): head h's state decays by 1 - 2^(-5 - h) at every token.

    The rest is as in ``chunk_simple_gla``.
    """
    check_chunk_size(chunk_size)
    g = _on(v, _retention_decay)
    return chunk_scan(
        q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_retention`` for few tokens; with ``reverse`` from the last token to the first."""
    g = _on(v, _retention_decay)
    return recurrent_scan(
        q, k, v, g, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens
    )


def _lightning_decay(layer_idx: int, num_layers: int) -> Callable[[int], list[float]]:
    """Log decays of lightning attention (Qin et al. 2024): -8 h / H (1 - layer / layers)."""
    if not 0 <= layer_idx < num_layers:
        raise ValueError(f"layer_idx: got {layer_idx}; 0 to num_layers = {num_layers} is needed")
    slope = -8 * (1 - layer_idx / num_layers)
    return lambda heads: [slope * h / heads for h in range(heads)]


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention (Qin et al. 2024): log decay -8 h / H (1 - layer_idx / num_layers).

    The rest is as in ``chunk_simple_gla``.
    """
    check_chunk_size(chunk_size)
    g = _on(v, _lightning_decay(layer_idx, num_layers))
    return chunk_scan(
        q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_lightning_attn`` for few tokens; with ``reverse`` from the last to the first."""
    g = _on(v, _lightning_decay(layer_idx, num_layers))
    return recurrent_scan(
        q, k, v, g, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens
    )


def _on(v: Tensor, decay: Callable[[int], list[float]]) -> Tensor:
    """[H] fp32 (fp64 beside fp64) on v's device."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    return torch.tensor(decay(v.shape[2]), dtype=dtype, device=v.device)
