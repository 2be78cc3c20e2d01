"""The feed-forward layer of a transformer block: plain, gated, and shared out among ranks.

Gated: Shazeer 2020, arXiv:2002.05202. Where an activation is ``F.silu`` the gate is that of SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn.ops.activations import swiglu
from flash_attn.ops.fused_dense import (
    ColumnParallelLinear,
    FusedMLP,
    ParallelFusedMLP,
    RowParallelLinear,
    parallel_pair,
)

__all__ = [
    "FusedMLP",
    "GatedMlp",
    "Mlp",
    "ParallelFusedMLP",
    "ParallelGatedMlp",
    "ParallelMLP",
]

_Activation = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """``fc2(activation(fc1(x)))``.

    Args:
        in_features: of x. hidden_features: default 4 · in_features. out_features: default
            in_features.
        activation: of the hidden features.
        bias1, bias2: whether fc1 and fc2 have one.
        return_residual: forward returns (out, x).
        device, dtype: of the parameters.
    """

    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: _Activation = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        hidden = hidden_features or 4 * in_features
        where = {"device": device, "dtype": dtype}
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, **where)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias2, **where)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(..., in_features) → (..., out_features)."""
        out = self.fc2(self.activation(self.fc1(x)))
        return (out, x) if self.return_residual else out


class ParallelMLP(nn.Module):
    """``Mlp`` with the hidden features shared out among the ranks of ``process_group``.

    ``sequence_parallel`` as in ``ColumnParallelLinear``; the others as in ``Mlp``.
    """

    fc1: ColumnParallelLinear
    fc2: RowParallelLinear

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: _Activation = F.gelu,
        process_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = True,
        bias1: bool = True,
        bias2: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        hidden = hidden_features or 4 * in_features
        fc1, fc2 = parallel_pair(
            (in_features, hidden, out_features or in_features), process_group, (bias1, bias2),
            sequence_parallel=sequence_parallel, device=device, dtype=dtype,
        )  # fmt: skip
        self.fc1, self.activation, self.fc2 = fc1, activation, fc2

    def forward(self, x: Tensor) -> Tensor:
        """(rows or this rank's rows, ..., in_features) → the same rows of (..., out_features)."""
        return self.fc2(self.activation(self.fc1(x)))


class GatedMlp(nn.Module):
    """``fc2(y * activation(gate))`` where ``fc1(x)`` is y and then the gate.

    Args:
        in_features, out_features, bias1, bias2, return_residual, device, dtype: as in ``Mlp``.
        hidden_features: of y; default 8/3 · in_features. Rounded up to ``multiple_of``.
        activation: of the gate: ``F.sigmoid`` is GLU, ``F.silu`` SwiGLU.
    """

    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: _Activation = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        hidden = _gated_features(in_features, hidden_features, multiple_of)
        where = {"device": device, "dtype": dtype}
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias1, **where)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias2, **where)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(..., in_features) → (..., out_features)."""
        out = self.fc2(_gated(self.fc1(x), self.activation))
        return (out, x) if self.return_residual else out


class ParallelGatedMlp(nn.Module):
    """``GatedMlp`` with the hidden features shared out among the ranks of ``process_group``.

    A rank's ``fc1`` makes its share of y and then its share of the gate.
    """

    fc1: ColumnParallelLinear
    fc2: RowParallelLinear

    def __init__(
        self,
        in_features: int,
        process_group: dist.ProcessGroup,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: _Activation = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        hidden = _gated_features(in_features, hidden_features, multiple_of)
        # Pairs stay together: with an odd share one rank would have a y without its gate.
        fc1, fc2 = parallel_pair(
            (in_features, hidden, out_features or in_features), process_group, (bias1, bias2),
            together=2, sequence_parallel=sequence_parallel, device=device, dtype=dtype,
        )  # fmt: skip
        self.fc1, self.activation, self.fc2 = fc1, activation, fc2

    def forward(self, x: Tensor) -> Tensor:
        """(rows or this rank's rows, ..., in_features) → the same rows of (..., out_features)."""
        return self.fc2(_gated(self.fc1(x), self.activation))


def _gated_features(in_features: int, hidden: int | None, multiple_of: int) -> int:
    hidden = int(8 * in_features / 3) if hidden is None else hidden
    return -(-hidden // multiple_of) * multiple_of


def _gated(x: Tensor, activation: _Activation) -> Tensor:
    """(..., 2 · hidden) → (..., hidden)."""
    if activation is F.sigmoid:
        return F.glu(x, dim=-1)
    y, gate = x.chunk(2, dim=-1)
    return swiglu(gate, y) if activation is F.silu else y * activation(gate)
