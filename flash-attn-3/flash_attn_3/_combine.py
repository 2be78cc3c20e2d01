"""Results over disjoint keys as one, and what is prepared before a call: nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attn.compat.tensors import into


def combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``flash_attn_combine``; summed in float32, or float64."""
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"out_partial, lse_partial: got shapes {tuple(out_partial.shape)} and "
            f"{tuple(lse_partial.shape)}; (splits, batch, seqlen, heads, head_dim), or (splits, "
            "total, heads, head_dim), and the same without head_dim are needed"
        )
    if not out_partial.is_floating_point() or not lse_partial.is_floating_point():
        raise ValueError(
            f"out_partial, lse_partial: got {out_partial.dtype} and {lse_partial.dtype}; floating "
            "dtypes are needed"
        )
    kept = out_partial.dtype if out_dtype is None else out_dtype
    dtype = torch.promote_types(torch.promote_types(out_partial.dtype, torch.float32),
                                lse_partial.dtype)  # fmt: skip
    parts = lse_partial.to(dtype)
    lse = torch.logsumexp(parts, 0)
    # A part that saw nothing has no share, whatever its out holds: not 0 times a NaN. One whose
    # sink is +inf has all of it.
    shares = torch.where(parts == -math.inf, 0.0, (parts - lse).exp())
    shares = torch.where(parts == math.inf, 1.0, shares).unsqueeze(-1)
    summed = torch.where(shares == 0, 0.0, out_partial.to(dtype) * shares).sum(0)
    return into(out, summed.to(kept)), lse


def metadata(cache_seqlens: Tensor | None) -> Tensor:
    """One int32 of 0 on the device of the call: nothing is prepared, and no call reads it."""
    device = None if cache_seqlens is None else cache_seqlens.device
    return torch.zeros(1, dtype=torch.int32, device=device)
