"""Activations and their derivatives, under the names that clients import.

The derivatives stand alone because some clients write backward passes of their own. ``gelu`` is the
tanh approximation here (Hendrycks & Gimpel 2016, arXiv:1606.08415); SwiGLU: Shazeer 2020,
arXiv:2002.05202; the squared ReLU: So et al. 2021, arXiv:2109.08668. Everything is elementwise on
torch operations; ``torch.compile`` fuses it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "bias_gelu",
    "bias_gelu_back",
    "bias_gelu_impl",
    "fast_gelu_impl",
    "gelu_bwd",
    "gelu_fwd",
    "relu_bwd",
    "sqrelu_bwd",
    "sqrelu_fwd",
    "swiglu",
    "swiglu_bwd",
    "swiglu_fwd",
]


def gelu_fwd(x: Tensor) -> Tensor:
    """gelu(x), by tanh."""
    return F.gelu(x, approximate="tanh")


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g times the derivative of ``gelu_fwd`` at x, in the dtype of x."""
    return _cast(torch.ops.aten.gelu_backward(g, x, approximate="tanh"), x.dtype)


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """gelu(y + bias) in the dtype of y, with one rounding: y (..., features), bias (features,)."""
    wide_y, wide_bias = _wide(y, bias)
    return _cast(gelu_fwd(wide_y + wide_bias), y.dtype)


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``bias_gelu`` with respect to y and bias, each in its dtype, from the
    result's gradient g: (..., features), and summed over the rows (features,)."""
    wide_g, wide_y, wide_bias = _wide(g, y, bias)
    gradient = gelu_bwd(wide_g, wide_y + wide_bias)
    return _cast(gradient, y.dtype), _cast(gradient.sum_to_size(bias.shape), bias.dtype)


class _BiasGelu(torch.autograd.Function):
    """Keeps y and bias as they came, and no fp32 sum of them."""

    @staticmethod
    def forward(ctx, y, bias):
        ctx.save_for_backward(y, bias)
        return bias_gelu(y, bias)

    @staticmethod
    def backward(ctx, g):
        return bias_gelu_back(g, *ctx.saved_tensors)


def bias_gelu_impl(y: Tensor, bias: Tensor) -> Tensor:
    """``bias_gelu``, whose backward is ``bias_gelu_back``."""
    return _BiasGelu.apply(y, bias)


# Differentiable, as everything of torch's is.
fast_gelu_impl = gelu_fwd


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g where x > 0, else 0, as torch's own."""
    return torch.where(x > 0, g, 0).to(x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """relu(x)²."""
    return F.relu(x).square()


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g times the derivative of ``sqrelu_fwd`` at x."""
    return (2.0 * g * F.relu(x)).to(x.dtype)


def _wide(*tensors: Tensor) -> list[Tensor]:
    """fp32 for 16 bits: a product of two roundings would be rounded again."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype; a cast of nothing loses the gradient when torch 2.11 compiles ``swiglu``."""
    return x if x.dtype == dtype else x.to(dtype)


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) · y, with one rounding."""
    wide_x, wide_y = _wide(x, y)
    return _cast(F.silu(wide_x) * wide_y, x.dtype)


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``swiglu_fwd`` with respect to x and y, from its result's."""
    wide_x, wide_y, wide_g = _wide(x, y, g)
    dx = torch.ops.aten.silu_backward(wide_g * wide_y, wide_x)
    return dx.to(x.dtype), (wide_g * F.silu(wide_x)).to(y.dtype)


class _SwiGLU(torch.autograd.Function):
    """Keeps x and y as they came, and no fp32 copy of either."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return swiglu_fwd(x, y)

    @staticmethod
    def backward(ctx, g):
        return swiglu_bwd(*ctx.saved_tensors, g)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) · y; differentiable. x, y (...), the same shape: the gate first."""
    return _SwiGLU.apply(x, y)
