"""Dropout, add and LayerNorm in one call, under the names that older clients import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from flash_attn.compat.names import refusing
from flash_attn.ops.triton.layer_norm import _dropout, layer_norm_fn

__all__ = [
    "DropoutAddLayerNorm",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_parallel_residual",
    "dropout_add_layer_norm_subset",
    "layer_norm",
]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension: (..., hidden) -> (..., hidden) in the dtype of x.

    ``weight`` and ``bias`` (hidden,) may have another dtype.
    """
    return layer_norm_fn(x, weight, bias, eps=epsilon)


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
) -> Any:
    """``norm(dropout(x0 * rowscale * layerscale) + residual)``; see ``dropout_add_layer_norm``."""
    if layerscale is not None:
        # Dropout only scales or zeroes an entry, so the order does not matter.
        x0 = x0 * layerscale.to(x0.dtype)
    results = layer_norm_fn(
        x0, weight, bias, residual=residual, eps=epsilon, dropout_p=dropout_p, rowscale=rowscale,
        prenorm=prenorm, residual_in_fp32=residual_in_fp32, is_rms_norm=is_rms_norm,
        return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
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
) -> Any:
    """``LayerNorm(dropout(x0 * rowscale * layerscale) + residual)``; differentiable.

    Args:
        x0, residual: (..., hidden); residual may be None.
        weight, bias, layerscale: (hidden,); the last two may be None.
        rowscale: (...) or (rows,), or None.
        prenorm: also return the sum that is normalised, in the dtype of ``residual`` (without one:
            fp32 if ``residual_in_fp32``, else the dtype of x0).
        return_dropout_mask: also return the mask (bool; None if dropout_p is 0).

    Returns:
        y, or a tuple (y, [sum], [mask]).
    """
    return dropout_add_norm(
        x0, residual, weight, bias, dropout_p, epsilon, rowscale, layerscale, prenorm,
        residual_in_fp32, return_dropout_mask, is_rms_norm=False,
    )  # fmt: skip


def dropout_add_layer_norm_subset(
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
    *,
    is_rms_norm: bool = False,
) -> Any:
    """``dropout_add_layer_norm`` where some rows have no x0, or no place in the result.

    With stochastic depth the rows that a branch leaves out need not be computed at all.

    Args:
        x0: (rows0, hidden), the rows that there are; residual (..., hidden) or None.
        x0_subset: (...), int: for each row of the sum which row of x0 it gets, counted from 1, or 0
            for none. None is every row in turn.
        out_subset: (...), int: for each row of the sum where in the result its norm goes, counted
            from 1, or 0 for nowhere. None is every row in turn.
        rowscale_const: factor on x0.
        out_numrows: rows of the result, with ``out_subset``.

    The others are those of ``dropout_add_layer_norm``; the sum is (..., hidden), whole.

    Returns:
        y (out_numrows, hidden) or (..., hidden); or a tuple (y, [sum], [mask of x0]).
    """
    hidden = x0.shape[-1]
    x0, mask = _scaled_dropout(x0.reshape(-1, hidden), dropout_p, rowscale_const, layerscale,
                               return_dropout_mask)  # fmt: skip
    if x0_subset is not None:
        x0 = torch.cat((x0.new_zeros(1, hidden), x0))[x0_subset.flatten().long()]
        shape = (*x0_subset.shape, hidden)
    else:
        shape = x0.shape if residual is None else residual.shape
    y, z = dropout_add_norm(
        x0.view(shape), residual, weight, bias, 0.0, epsilon, None, None, True,
        residual_in_fp32, False, is_rms_norm,
    )  # fmt: skip
    if out_subset is not None:
        places = out_subset.flatten().long()
        rows = y.new_zeros(out_numrows + 1, hidden)
        y = rows.index_copy(0, places, y.reshape(-1, hidden))[1:]
    results = [y, *([z] if prenorm else []), *([mask] if return_dropout_mask else [])]
    return results[0] if len(results) == 1 else tuple(results)


def _scaled_dropout(x: Tensor, p: float, scale: float, layerscale: Tensor | None, want_mask: bool):
    """Drops before rows are moved, so that what is dropped does not depend on where they go."""
    x = x if layerscale is None else x * layerscale.to(x.dtype)
    x = x if scale == 1.0 else x * scale
    return _dropout(x, p, want_mask)


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
) -> Any:
    """Two norms of one sum ``dropout(x0) + dropout(x1) + residual``, as parallel blocks need them.

    Returns:
        (y0, y1, [sum], [mask0, mask1]); y1 is None without ``weight1``.
    """
    results = layer_norm_fn(
        x0, weight0, bias0, residual=residual, x1=x1, weight1=weight1, bias1=bias1, eps=epsilon,
        dropout_p=dropout_p, prenorm=prenorm, residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
    results = results if isinstance(results, tuple) else (results,)
    return results if weight1 is not None else (results[0], None, *results[1:])


class DropoutAddNorm(nn.Module):
    """``dropout_add_norm`` as a module: what those of LayerNorm and RMSNorm have in common."""

    is_rms_norm: ClassVar[bool]
    weight: nn.Parameter
    bias: nn.Parameter | None

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
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        where = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(hidden_size, **where))
        bias = None if self.is_rms_norm else nn.Parameter(torch.empty(hidden_size, **where))
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        return dropout_add_norm(
            x0, residual, self.weight, self.bias, self.p if self.training else 0.0, self.eps,
            rowscale=None, layerscale=None, prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32, return_dropout_mask=False,
            is_rms_norm=self.is_rms_norm,
        )  # fmt: skip


class DropoutAddLayerNorm(DropoutAddNorm):
    """The module of ``dropout_add_layer_norm``: ``forward(x0, residual=None)``."""

    is_rms_norm = False
    bias: nn.Parameter


if not TYPE_CHECKING:
    __getattr__ = refusing(__name__)
