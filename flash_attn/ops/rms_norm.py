"""RMSNorm, alone and with dropout and residual, under the names that clients import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flash_attn.ops.layer_norm import (
    DropoutAddNorm,
    dropout_add_layer_norm_parallel_residual,
    dropout_add_layer_norm_subset,
    dropout_add_norm,
)
from flash_attn.ops.triton.layer_norm import rms_norm_fn

__all__ = [
    "DropoutAddRMSNorm",
    "RMSNorm",
    "dropout_add_rms_norm",
    "dropout_add_rms_norm_parallel_residual",
    "dropout_add_rms_norm_subset",
    "rms_norm",
]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension: (..., hidden) -> (..., hidden) in the dtype of x."""
    return rms_norm_fn(x, weight, None, eps=epsilon)


def dropout_add_rms_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """``dropout_add_layer_norm`` with RMSNorm."""
    return dropout_add_norm(
        x0, residual, weight, bias, dropout_p, epsilon, rowscale, layerscale, prenorm,
        residual_in_fp32, return_dropout_mask, is_rms_norm=True,
    )  # fmt: skip


def dropout_add_rms_norm_subset(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    layerscale: Tensor | None = None,
    x0_subset: Tensor | None = None,
    out_subset: Tensor | None = None,
    rowscale_const: float = 1.0,
    out_numrows: int = 0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """``dropout_add_layer_norm_subset`` with RMSNorm."""
    return dropout_add_layer_norm_subset(
        x0, residual, weight, bias, dropout_p, epsilon, layerscale, x0_subset, out_subset,
        rowscale_const, out_numrows, prenorm, residual_in_fp32, return_dropout_mask,
        is_rms_norm=True,
    )  # fmt: skip


def dropout_add_rms_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """``dropout_add_layer_norm_parallel_residual`` with RMSNorm."""
    return dropout_add_layer_norm_parallel_residual(
        x0, x1, residual, weight0, bias0, weight1, bias1, dropout_p, epsilon, prenorm,
        residual_in_fp32, return_dropout_mask, is_rms_norm=True,
    )  # fmt: skip


class RMSNorm(nn.Module):
    """RMSNorm with a learnable weight (hidden_size,)."""

    weight: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class DropoutAddRMSNorm(DropoutAddNorm):
    """The module of ``dropout_add_rms_norm``: ``forward(x0, residual=None)``."""

    is_rms_norm = True
