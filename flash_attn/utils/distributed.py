"""Collectives with gradients, and what tensor and sequence parallelism share.

A tensor is sharded, or its parts are summed, over the ranks of a ``process_group``, along its first
dimension (Korthikanti et al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "AllGatherFunc",
    "AllReduceFunc",
    "ReduceScatterFunc",
    "all_gather",
    "all_gather_raw",
    "all_reduce",
    "all_reduce_raw",
    "allreduce_sequence_parallel_grad",
    "get_dim_for_local_rank",
    "reduce_scatter",
    "reduce_scatter_raw",
    "replicate",
    "sync_shared_params",
]


def _collective(name: str, name_before_2_13: str):
    return getattr(dist, name, None) or getattr(dist, name_before_2_13)


def all_gather_raw(
    input_: Tensor, process_group: dist.ProcessGroup | None, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """(rows, ...) of each rank → (ranks · rows, ...), and the handle; no gradient. None is the
    default group."""
    world = dist.get_world_size(process_group)
    output = input_.new_empty(world * input_.shape[0], *input_.shape[1:])
    gather = _collective("all_gather_single", "all_gather_into_tensor")
    handle = gather(output, input_.contiguous(), group=process_group, async_op=async_op)
    return output, handle


def reduce_scatter_raw(
    input_: Tensor, process_group: dist.ProcessGroup, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """(ranks · rows, ...) of each rank → this rank's rows of their sum, and the handle."""
    world = dist.get_world_size(process_group)
    if input_.shape[0] % world:
        raise ValueError(
            f"input_: got {input_.shape[0]} rows; a multiple of {world} ranks is needed"
        )
    output = input_.new_empty(input_.shape[0] // world, *input_.shape[1:])
    scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
    handle = scatter(output, input_.contiguous(), group=process_group, async_op=async_op)
    return output, handle


def all_reduce_raw(
    input_: Tensor, process_group: dist.ProcessGroup, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """The sum over the ranks, in place where the input is contiguous, and the handle."""
    input_ = input_.contiguous()
    return input_, dist.all_reduce(input_, group=process_group, async_op=async_op)


_Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def _rows_of_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_gather_raw(x, group)[0]


def _own_rows_of_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return reduce_scatter_raw(x, group)[0]


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_reduce_raw(x.clone(), group)[0]


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _function(name: str, does: _Collective, gradient: _Collective, doc: str) -> Any:
    """An autograd function that does the one on its way there and the other on the way back."""

    def forward(ctx: Any, input_: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return does(input_, process_group)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gradient(grad, ctx.process_group), None

    both = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), {"__doc__": doc, "__module__": __name__, **both})


AllGatherFunc: Any = _function(
    "AllGatherFunc", _rows_of_all, _own_rows_of_sum,
    "Rows of all ranks, one after another; the gradient is summed and scattered.",
)  # fmt: skip
ReduceScatterFunc: Any = _function(
    "ReduceScatterFunc", _own_rows_of_sum, _rows_of_all,
    "This rank's rows of the sum over the ranks; the gradient is gathered.",
)  # fmt: skip
AllReduceFunc: Any = _function(
    "AllReduceFunc", _sum, _same,
    "The sum over the ranks; each of them has the whole gradient already.",
)  # fmt: skip
all_gather: _Collective = AllGatherFunc.apply
reduce_scatter: _Collective = ReduceScatterFunc.apply
all_reduce: _Collective = AllReduceFunc.apply
#: What all ranks hold alike, on its way into work that they share: the gradient is their sum.
replicate: _Collective = _function("_Replicate", _same, _sum, "See ``replicate``.").apply


def sync_shared_params(model: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Copies the parameters marked ``_shared_params`` from the group's first rank to the others."""
    source = dist.get_global_rank(process_group, 0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if getattr(parameter, "_shared_params", False):
                dist.broadcast(parameter, src=source, group=process_group)


def allreduce_sequence_parallel_grad(model: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Sums the gradients of the parameters marked ``_sequence_parallel``: ranks see rows."""
    gradients = [
        parameter.grad
        for _, parameter in sorted(model.named_parameters())
        if getattr(parameter, "_sequence_parallel", False) and parameter.grad is not None
    ]
    if not gradients:
        return
    with torch.no_grad():  # one message for all of them
        together = torch.cat([grad.flatten() for grad in gradients])
        dist.all_reduce(together, group=process_group)
        for grad, summed in zip(gradients, together.split([g.numel() for g in gradients])):
            grad.copy_(summed.view_as(grad))


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """This rank's share of ``dim`` in units of ``multiple_of``; the first ranks take the rest."""
    units = dim // multiple_of
    return multiple_of * (units // world_size + (local_rank < units % world_size))
