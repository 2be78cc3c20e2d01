"""RMSNorm with a gate, as the layers of linear attention end."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FusedRMSNormGated", "RMSNorm", "gated_rms_norm"]


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-5,
    groups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """norm(x) weight silu(gate), or norm(x silu(gate)) weight; x, gate [..., D], weight [D].

    groups: as many parts of x have a norm of their own. Computed in fp32, result in x's dtype.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    factor = None if gate is None else F.silu(gate.to(compute))
    if factor is not None and not norm_before_gate:
        wide = wide * factor
    parts = wide.unflatten(-1, (groups, -1))
    wide = (parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
    if weight is not None:
        wide = wide * weight.to(compute)
    if factor is not None and norm_before_gate:
        wide = wide * factor
    return wide.to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, with fla's parameter name: ``weight`` [hidden_size]."""

    weight: nn.Parameter | None

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5):
        """Arguments: see the class."""
        super().__init__()
        self.eps = eps
        if elementwise_affine:
            self.weight = nn.Parameter(torch.ones(hidden_size))
        else:
            self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        return gated_rms_norm(x, None, self.weight, self.eps)


class FusedRMSNormGated(RMSNorm):
    """RMSNorm, then the gate: ``forward(x, g)`` is norm(x) weight silu(g)."""

    def forward(self, x: Tensor, g: Tensor) -> Tensor:  # type: ignore[override]
        return gated_rms_norm(x, g, self.weight, self.eps)
