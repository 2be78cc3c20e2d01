"""Linear layers and the feed-forward layer of two of them, also sharded over ranks.

Tensor parallelism: Shoeybi et al. 2019, arXiv:1909.08053. With ``sequence_parallel`` (Korthikanti
et al. 2022, arXiv:2205.05198) each rank holds its share of the rows, dimension 0, outside of
the sharded layers; without it all ranks hold all rows. torch's linear adds the bias in one call,
and ``torch.compile`` fuses the activation; nothing else is fused here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn.compat.names import refusing
from flash_attn.ops.activations import gelu_fwd, sqrelu_fwd
from flash_attn.utils.distributed import (
    all_gather,
    all_reduce,
    get_dim_for_local_rank,
    reduce_scatter,
    replicate,
)

__all__ = [
    "ColumnParallelLinear",
    "FusedDense",
    "FusedMLP",
    "ParallelFusedMLP",
    "RowParallelLinear",
    "fused_dense_func",
    "fused_mlp_func",
]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_approx": gelu_fwd,
    "relu": F.relu,
    "sqrelu": sqrelu_fwd,
}


def into_ranks(
    x: Tensor, process_group: dist.ProcessGroup | None, sequence_parallel: bool
) -> Tensor:
    """All rows, for a layer of which each rank has some columns."""
    if process_group is None:
        return x
    return (all_gather if sequence_parallel else replicate)(x, process_group)


def out_of_ranks(
    x: Tensor, process_group: dist.ProcessGroup | None, sequence_parallel: bool
) -> Tensor:
    """The sum of what the ranks have, this rank's rows of it or all."""
    if process_group is None:
        return x
    return (reduce_scatter if sequence_parallel else all_reduce)(x, process_group)


def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: bool = False,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Any:
    """``F.linear(x, weight, bias)``; with ``process_group`` of the rows of all ranks.

    x (..., in_features) → (..., out_features), or that and x with ``return_residual``.
    """
    out = F.linear(into_ranks(x, process_group, sequence_parallel), weight, bias)
    return (out, x) if return_residual else out


class FusedDense(nn.Linear):
    """``nn.Linear`` that can also return its input."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: dist.ProcessGroup | None = None) -> Any:
        return fused_dense_func(
            x, self.weight, self.bias, self.return_residual, process_group=process_group
        )


def _share(features: int, process_group: dist.ProcessGroup, multiple_of: int, name: str) -> int:
    if features % multiple_of:
        raise ValueError(f"{name}: got {features}; a multiple of {multiple_of} is needed")
    world, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    return get_dim_for_local_rank(features, world, rank, multiple_of)


class ColumnParallelLinear(nn.Linear):
    """Each rank computes some of the output's features, for all rows.

    Args:
        in_features, out_features: of the whole layer; ``weight`` is (share, in_features).
        process_group: the ranks.
        bias: each rank has that of its features.
        sequence_parallel: x holds this rank's rows.
        multiple_of: features that stay together, such as a head's.

    Raises:
        ValueError: out_features that are no multiple of multiple_of.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: dist.ProcessGroup,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        share = _share(out_features, process_group, multiple_of, "out_features")
        super().__init__(in_features, share, bias=bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """(rows or this rank's rows, ..., in_features) → (rows, ..., share)."""
        x = into_ranks(x, self.process_group, self.sequence_parallel)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Linear):
    """Each rank reads some of the input's features; what they make is summed over the ranks.

    ``weight`` is (out_features, share), and the first rank alone has the bias. Otherwise as
    ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: dist.ProcessGroup,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        share = _share(in_features, process_group, multiple_of, "in_features")
        bias = bias and dist.get_rank(process_group) == 0
        super().__init__(share, out_features, bias=bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """(rows, ..., share) → (rows or this rank's rows, ..., out_features)."""
        out = F.linear(x, self.weight, self.bias)
        return out_of_ranks(out, self.process_group, self.sequence_parallel)


def parallel_pair(
    features: tuple[int, int, int],
    process_group: dist.ProcessGroup | None,
    biases: tuple[bool, bool],
    together: int = 1,
    **rest: Any,
) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """The two layers of a feed-forward layer that ranks share.

    features: of x, of what the first layer makes for each of ``together``, and of the result.
    together: what the first layer makes of a hidden feature, kept on one rank.
    """
    if process_group is None:
        raise ValueError("process_group: got None; the ranks that share the layer are needed")
    into, hidden, out = features
    return (
        ColumnParallelLinear(
            into, together * hidden, process_group, bias=biases[0], multiple_of=together, **rest
        ),
        RowParallelLinear(hidden, out, process_group, bias=biases[1], **rest),
    )


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int | str = 0,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Any:
    """``linear2(activation(linear1(x)))``, with linear1 of the rows of all ranks.

    Args:
        x: (..., in_features).
        weight1, bias1: (hidden, in_features), (hidden,) or None.
        weight2, bias2: (out_features, hidden), (out_features,) or None.
        activation: "gelu_approx", "relu" or "sqrelu".
        return_residual: also return x.
        checkpoint_lvl: above 0 nothing between the two layers is kept for the backward.
        save_pre_act, heuristic: accepted for the drop-in; torch decides.
        process_group, sequence_parallel: as in ``fused_dense_func``. What comes out is this rank's
            part of a sum.
    """
    act = _activation(activation)

    def run(x: Tensor) -> Tensor:
        hidden = fused_dense_func(
            x, weight1, bias1, process_group=process_group, sequence_parallel=sequence_parallel
        )
        return F.linear(act(hidden), weight2, bias2)

    out = checkpoint(run, x, use_reentrant=False) if checkpoint_lvl > 0 else run(x)
    return (out, x) if return_residual else out


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: got {name!r}; accepted are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class FusedMLP(nn.Module):
    """``fc2(activation(fc1(x)))``.

    Args:
        in_features: of x. hidden_features: default 4 · in_features. out_features: default
            in_features.
        bias1, bias2: whether the layers have one.
        activation, return_residual, checkpoint_lvl, heuristic: as in ``fused_mlp_func``.
    """

    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        _activation(activation)
        where = {"device": device, "dtype": dtype}
        hidden = hidden_features or 4 * in_features
        self.activation = activation
        self.return_residual = return_residual
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = heuristic
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, **where)
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias2, **where)

    def forward(self, x: Tensor, process_group: dist.ProcessGroup | None = None) -> Any:
        """(..., in_features) → (..., out_features), and x with ``return_residual``."""
        out = _through(self, x, process_group, sequence_parallel=True)
        return (out, x) if self.return_residual else out


class ParallelFusedMLP(nn.Module):
    """``FusedMLP`` with hidden features shared out among ranks; see ``ColumnParallelLinear``."""

    fc1: ColumnParallelLinear
    fc2: RowParallelLinear

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: str = "gelu_approx",
        process_group: dist.ProcessGroup | None = None,
        bias1: bool = True,
        bias2: bool = True,
        sequence_parallel: bool = True,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        _activation(activation)
        hidden = hidden_features or 4 * in_features
        self.fc1, self.fc2 = parallel_pair(
            (in_features, hidden, out_features or in_features), process_group, (bias1, bias2),
            sequence_parallel=sequence_parallel, device=device, dtype=dtype,
        )  # fmt: skip
        self.activation = activation
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = heuristic

    def forward(self, x: Tensor) -> Tensor:
        """(rows or this rank's rows, ..., in_features) → the same rows of (..., out_features)."""
        return _through(self, x, self.process_group, self.sequence_parallel)


def _through(
    mlp: FusedMLP | ParallelFusedMLP, x: Tensor, process_group, sequence_parallel: bool
) -> Tensor:
    fc1, fc2 = mlp.fc1, mlp.fc2
    out = fused_mlp_func(
        x, fc1.weight, fc2.weight, fc1.bias, fc2.bias, activation=mlp.activation,
        checkpoint_lvl=mlp.checkpoint_lvl, process_group=process_group,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return out_of_ranks(out, process_group, sequence_parallel)


if not TYPE_CHECKING:
    __getattr__ = refusing(__name__)
