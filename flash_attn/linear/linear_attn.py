"""Linear attention without a decay, normalised or not (Katharopoulos et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.linear._checks import scale_of
from flash_attn.linear.core import chunk_scan, recurrent_scan

__all__ = ["chunk_linear_attn", "fused_recurrent_linear_attn"]

# The state, or with the sum of the keys that normalises.
State = Tensor | tuple[Tensor, Tensor] | None
_EPS = 1e-10


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Linear attention without a decay: see ``chunk_scan``.

    Arguments:
        q, k: [B, T, HK, K], features; v: [B, T, H, V].
        initial_state: fp32 [N, H, K, V]; or with ``normalize`` a tuple of it and of the keys' sum
            z, fp32 [N, H, K].
        normalize: o is divided by the sum of q's products with the keys, plus 1e-10.

    Returns:
        o [B, T, H, V], and the final state or None; with ``normalize`` the tuple with z.

    Raises:
        ValueError, TypeError: as ``chunk_scan``; for a tuple without ``normalize``.
    """
    return _attend(
        chunk_scan, q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens
    )


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """``chunk_linear_attn`` for few tokens; with ``reverse`` from the last token to the first."""

    def scan(*args, **kwargs):
        return recurrent_scan(*args, **kwargs, reverse=reverse)

    return _attend(scan, q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def _attend(
    scan, q: Tensor, k: Tensor, v: Tensor, scale: float | None, initial_state: State,
    output_final_state: bool, normalize: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, State]:  # fmt: skip
    state, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    if z is not None and not normalize:
        raise ValueError("initial_state: a tuple with z is for normalize=True")
    scale = scale_of(scale, k.shape[-1])
    shared = dict(scale=scale, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    o, final = scan(q, k, v, initial_state=state, **shared)
    if not normalize:
        return o, final
    # The keys' sum is the state of a v of ones.
    ones = torch.ones_like(v[..., :1])
    z = None if z is None else z[..., None]
    divisor, final_z = scan(q, k, ones, initial_state=z, **shared)
    o = o / (divisor + _EPS)
    return o, (final, final_z.squeeze(-1)) if output_final_state else None
