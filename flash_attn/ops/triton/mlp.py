"""The feed-forward layer with a squared ReLU, under the names that clients import."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.ops.fused_dense import FusedMLP, fused_mlp_func

__all__ = ["FusedDenseSqreluDense", "fused_dense_sqrelu_dense_function"]


def fused_dense_sqrelu_dense_function(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    checkpoint_lvl: int = 0,
) -> Tensor:
    """``linear2(relu(linear1(x))²)``; the arguments are those of ``fused_mlp_func``."""
    return fused_mlp_func(
        x, weight1, weight2, bias1, bias2, activation="sqrelu", checkpoint_lvl=checkpoint_lvl
    )


class FusedDenseSqreluDense(FusedMLP):
    """``FusedMLP`` with a squared ReLU."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        checkpoint_lvl: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__(
            in_features, hidden_features, out_features, bias1, bias2, activation="sqrelu",
            checkpoint_lvl=checkpoint_lvl, device=device, dtype=dtype,
        )  # fmt: skip
