"""Dropout, add and LayerNorm in one call, under the names that older clients import."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn.ops.triton.layer_norm import layer_norm_fn

__all__ = [
    "DropoutAddLayerNorm",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_parallel_residual",
    "layer_norm",
]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension: (..., hidden) -> (..., hidden)."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def dropout_add_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None,
    layerscale: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
    is_rms_norm: bool,
):
    """``norm(dropout(x0 * rowscale * layerscale) + residual)``; see ``dropout_add_layer_norm``."""
    if layerscale is not None:
        # Dropout only scales or zeroes an entry, so the order does not matter.
        x0 = x0 * layerscale.to(x0.dtype)
    results = layer_norm_fn(
        x0,
        weight,
        bias,
        residual=residual,
        eps=epsilon,
        dropout_p=dropout_p,
        rowscale=rowscale,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=return_dropout_mask,
    )
    return results[:-1] if return_dropout_mask else results  # there is no second mask


def dropout_add_layer_norm(
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
):
    """``LayerNorm(dropout(x0 * rowscale * layerscale) + residual)``; differentiable.

    Args:
        x0, residual: (..., hidden); residual may be None.
        weight, bias, layerscale: (hidden,); the last two may be None.
        rowscale: (...), or None.
        prenorm: also return the sum that is normalised, in the dtype of ``residual`` (without one:
            fp32 if ``residual_in_fp32``, else the dtype of x0).
        return_dropout_mask: also return the mask (bool; None if dropout_p is 0).

    Returns:
        y, or a tuple (y, [sum], [mask]).
    """
    return dropout_add_norm(
        x0,
        residual,
        weight,
        bias,
        dropout_p,
        epsilon,
        rowscale,
        layerscale,
        prenorm,
        residual_in_fp32,
        return_dropout_mask,
        is_rms_norm=False,
    )


def dropout_add_layer_norm_parallel_residual(
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
    *,
    is_rms_norm: bool = False,
):
    """Two norms of one sum ``dropout(x0) + dropout(x1) + residual``, as parallel blocks need them.

    Returns:
        (y0, y1, [sum], [mask0, mask1]); y1 is None without ``weight1``.
    """
    results = layer_norm_fn(
        x0,
        weight0,
        bias0,
        residual=residual,
        x1=x1,
        weight1=weight1,
        bias1=bias1,
        eps=epsilon,
        dropout_p=dropout_p,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=return_dropout_mask,
    )
    results = results if isinstance(results, tuple) else (results,)
    return results if weight1 is not None else (results[0], None, *results[1:])


class DropoutAddLayerNorm(nn.Module):
    """The module of ``dropout_add_layer_norm``: ``forward(x0, residual=None)``."""

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def forward(self, x0: Tensor, residual: Tensor | None = None):
        return dropout_add_layer_norm(
            x0,
            residual,
            self.weight,
            self.bias,
            self.p if self.training else 0.0,
            self.eps,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
        )
