"""LayerNorm and RMSNorm with what surrounds them in a transformer block: dropout, residual, cast.

``z = dropout(x * rowscale) + dropout(x1) + residual``;  ``y = norm(z)``. Sums and norms are
fp32 (fp64 for fp64), and z is rounded only where it is returned. RMSNorm: Zhang & Sennrich 2019,
arXiv:1910.07467.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn.compat.functions import Applied, function_class
from flash_attn.compat.names import refusing

__all__ = [
    "LayerNormFn",
    "LayerNormLinearFn",
    "RMSNorm",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layer_norm_ref",
    "rms_norm_fn",
    "rms_norm_ref",
]


def _norm(
    z: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_weight: bool,
    is_rms_norm: bool,
) -> Tensor:
    """(..., hidden) -> (..., hidden) in the dtype of z."""
    weight = weight.to(z.dtype) + 1 if zero_centered_weight else weight.to(z.dtype)
    bias = None if bias is None else bias.to(z.dtype)
    if not is_rms_norm:
        return F.layer_norm(z, weight.shape, weight, bias, eps)
    y = F.rms_norm(z, weight.shape, weight, eps)
    return y if bias is None else y + bias


def _dropout(x: Tensor, p: float, want_mask: bool) -> tuple[Tensor, Tensor | None]:
    """The kept entries over 1 - p, and where they are (bool) if that is wanted and p > 0."""
    if p == 0.0:
        return x, None
    if not want_mask:
        return F.dropout(x, p), None
    mask = torch.rand_like(x, dtype=torch.float32) >= p
    scale = 0.0 if p == 1.0 else 1 / (1 - p)
    return torch.where(mask, x * scale, 0), mask


def _store(value: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    value = value.to(dtype)
    return value if out is None else out.copy_(value)


def _check(
    x: Tensor, weight: Tensor, x1: Tensor | None, rowscale: Tensor | None, dropout_p: float
) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p: got {dropout_p}; 0 to 1 is needed")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight: got shape {tuple(weight.shape)}; x {tuple(x.shape)} needs ({x.shape[-1]},)"
        )
    rows = tuple(x.shape[:-1])
    if rowscale is not None and tuple(rowscale.shape) not in (rows, (math.prod(rows),)):
        raise ValueError(
            f"rowscale: got shape {tuple(rowscale.shape)}; one factor per row of x is needed, "
            f"{rows} or ({math.prod(rows)},)"
        )
    if rowscale is not None and x1 is not None:
        raise ValueError("rowscale with x1: it is not defined which of the two it scales")


def _scaled_rows(x: Tensor, rowscale: Tensor) -> Tensor:
    """x (..., hidden) times a factor per row: (...) or (rows,)."""
    return x * rowscale.reshape(x.shape[:-1]).unsqueeze(-1)


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """Norm of ``z = dropout(x * rowscale) + dropout(x1) + residual``; differentiable.

    Args:
        x, x1, residual: (..., hidden); the last two may be None.
        weight, bias: (hidden,); bias may be None.
        weight1, bias1: of a second norm of the same z (parallel blocks), or None.
        eps: joins the variance (LayerNorm) or the mean square (RMSNorm).
        dropout_p: 0 to 1; applied as often as the function is called: pass 0 in evaluation.
        rowscale: (...) or (rows,), one factor per row of x (stochastic depth); not with x1.
        prenorm: also return z.
        residual_in_fp32: z is returned in fp32 when ``residual`` is None, else in its dtype.
        zero_centered_weight: the norm multiplies by ``weight + 1``.
        is_rms_norm: RMSNorm in place of LayerNorm.
        return_dropout_mask: also return the masks of x and x1: bool, or None where unused.
        out_dtype: of y; default the dtype of x.
        out, residual_out: tensors to write y and z into, z also without ``prenorm``.

    Returns:
        y, or a tuple (y, [y1 with weight1], [z if prenorm], [mask, mask1 if return_dropout_mask]).

    Raises:
        ValueError: shapes that do not fit, dropout_p outside [0, 1], or rowscale together with x1.
    """
    _check(x, weight, x1, rowscale, dropout_p)
    if residual is not None:
        z_dtype = residual.dtype
    else:
        z_dtype = torch.float32 if residual_in_fp32 else x.dtype
    out_dtype = out_dtype or x.dtype

    alone = residual is None and x1 is None and rowscale is None and dropout_p == 0.0
    parameters = [t.dtype for t in (weight, bias, weight1, bias1) if t is not None]
    # With nothing to add, torch's own norm reads x as it is and widens inside; what it reads beside
    # x has to have the dtype of x on a GPU, and would be rounded to it here.
    as_it_is = alone and not zero_centered_weight and {*parameters, out_dtype} == {x.dtype}
    z = x if as_it_is else x.to(torch.promote_types(x.dtype, torch.float32))
    mask = mask1 = None
    if rowscale is not None:
        z = _scaled_rows(z, rowscale)
    z, mask = _dropout(z, dropout_p, return_dropout_mask)
    if x1 is not None:
        dropped, mask1 = _dropout(x1.to(z.dtype), dropout_p, return_dropout_mask)
        z = z + dropped
    if residual is not None:
        z = z + residual

    results = [
        _store(_norm(z, weight, bias, eps, zero_centered_weight, is_rms_norm), out_dtype, out)
    ]
    if weight1 is not None:
        y1 = _norm(z, weight1, bias1, eps, zero_centered_weight, is_rms_norm)
        results.append(y1.to(out_dtype))
    if prenorm or residual_out is not None:
        z = _store(z, z_dtype, residual_out)
    if prenorm:
        results.append(z)
    if return_dropout_mask:
        results += [mask, mask1]
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """``layer_norm_fn`` with ``is_rms_norm=True``."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        residual_in_fp32, zero_centered_weight, is_rms_norm=True, out_dtype=out_dtype, out=out,
        return_dropout_mask=return_dropout_mask, residual_out=residual_out,
    )  # fmt: skip


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """``F.linear(norm(x + residual))``: (..., hidden) -> (..., features); and z if ``prenorm``."""
    y, z = layer_norm_fn(
        x, norm_weight, norm_bias, residual=residual, eps=eps, prenorm=True,
        residual_in_fp32=residual_in_fp32, is_rms_norm=is_rms_norm,
    )  # fmt: skip
    out = F.linear(y.to(linear_weight.dtype), linear_weight, linear_bias)
    return (out, z) if prenorm else out


class RMSNorm(nn.Module):
    """RMSNorm of ``dropout(x) + residual``; see ``rms_norm_fn``."""

    weight: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        self.eps = eps
        self.dropout_p = dropout_p
        self.zero_centered_weight = zero_centered_weight
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        return rms_norm_fn(
            x, self.weight, None, residual=residual, eps=self.eps,
            dropout_p=self.dropout_p if self.training else 0.0, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, zero_centered_weight=self.zero_centered_weight,
        )  # fmt: skip


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
    *,
    is_rms_norm: bool = False,
) -> Any:
    """``layer_norm_fn`` step by step in the dtype of its inputs, or fp32 with ``upcast``.

    To compare with. ``dropout_mask`` and ``dropout_mask1`` are True where x and x1 are kept.

    Returns:
        y, or a tuple (y, [y1 with weight1], [z if prenorm]); y in the dtype of x.
    """
    dtype = x.dtype
    if upcast:
        x, weight, bias, residual, x1, weight1, bias1, rowscale = (
            None if t is None else t.float()
            for t in (x, weight, bias, residual, x1, weight1, bias1, rowscale)
        )
    z = x if rowscale is None else _scaled_rows(x, rowscale)
    z = _masked_dropout(z, dropout_p, dropout_mask)
    if x1 is not None:
        z = z + _masked_dropout(x1, dropout_p, dropout_mask1)
    if residual is not None:
        z = (z + residual).to(z.dtype)
    rest = (eps, zero_centered_weight, is_rms_norm)
    results = [_norm(z, weight, bias, *rest).to(dtype)]
    if weight1 is not None:
        results.append(_norm(z, weight1, bias1, *rest).to(dtype))
    if prenorm:
        results.append(z)
    return results[0] if len(results) == 1 else tuple(results)


def _masked_dropout(x: Tensor, p: float, mask: Tensor | None) -> Tensor:
    if p == 0.0:
        return x
    return F.dropout(x, p) if mask is None else x.masked_fill(~mask, 0.0) / (1.0 - p)


def rms_norm_ref(*args: Any, **kwargs: Any) -> Any:
    """``layer_norm_ref`` with RMSNorm."""
    return layer_norm_ref(*args, is_rms_norm=True, **kwargs)


LayerNormFn: Applied = function_class("LayerNormFn", layer_norm_fn, __name__)
LayerNormLinearFn: Applied = function_class("LayerNormLinearFn", layer_norm_linear_fn, __name__)

if not TYPE_CHECKING:
    __getattr__ = refusing(__name__)
