"""Mamba 2's block from its input projection on, in one call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_attn.linear.conv import causal_conv1d_fn
from flash_attn.linear.mamba import mamba_chunk_scan_combined
from flash_attn.linear.norm import gated_rms_norm

__all__ = ["mamba_split_conv1d_scan_combined"]


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Split, convolution, scan, gated norm and output projection of a Mamba 2 block.

    Arguments:
        zxbcdt: [batch, T, 2 H P + 2 G N + H], the input projection's z, x, B, C and dt.
        conv1d_weight: [H P + 2 G N, W]; conv1d_bias: [H P + 2 G N].
        dt_bias, A: [H]; D: [H], or [H, P], which gives P; else ``headdim`` does.
        chunk_size, initial_states, seq_idx, dt_limit: as in ``mamba_chunk_scan_combined``.
        activation: of the convolution.
        rmsnorm_weight: [H P]; None: no norm, and z gates the scan. The norm is that of each of G
            parts; ``norm_before_gate`` or of what z has gated.
        outproj_weight, outproj_bias: of the linear layer at the end, if there is one.

    Returns:
        out [batch, T, H P or what the projection makes], or a tuple with [batch, H, P, N].

    Raises:
        ValueError: for sizes that do not fit.
    """
    heads = A.shape[0]
    if D.dim() == 2:
        headdim = D.shape[1]
    if headdim is None:
        raise ValueError("headdim: needed where D is [H]")
    inner = heads * headdim
    mixed = conv1d_weight.shape[0]
    states, rest = divmod(mixed - inner, 2 * ngroups)
    if rest or states <= 0 or zxbcdt.shape[-1] != inner + mixed + heads:
        raise ValueError(
            f"zxbcdt: got {zxbcdt.shape[-1]} columns; z, x, B, C and dt of {heads} heads of "
            f"{headdim}, {ngroups} groups and a convolution of {mixed} channels have "
            f"{inner + mixed + heads}"
        )
    z, xBC, dt = zxbcdt.split((inner, mixed, heads), -1)
    xBC = causal_conv1d_fn(xBC.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation).mT
    x, B, C = xBC.split((inner, ngroups * states, ngroups * states), -1)
    norms = rmsnorm_weight is not None
    found = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, headdim)), dt, A,
        B.unflatten(-1, (ngroups, states)), C.unflatten(-1, (ngroups, states)),
        chunk_size, D, None if norms else z.unflatten(-1, (heads, headdim)), dt_bias,
        initial_states, seq_idx, None, True, dt_limit, return_final_states,
    )  # fmt: skip
    out = (found[0] if return_final_states else found).flatten(2)
    if norms:
        out = gated_rms_norm(out, z, rmsnorm_weight, rmsnorm_eps, ngroups, norm_before_gate)
    if outproj_weight is not None:
        dtype = torch.get_autocast_dtype(out.device.type) if _in_autocast(out) else None
        out = F.linear(out.to(dtype or outproj_weight.dtype), outproj_weight, outproj_bias)
    return (out, found[1]) if return_final_states else out


def _in_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)
