"""Heads against rows: from a part of the rows and all heads to all rows and a part of the heads."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


def rows_for_heads(x: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """(b, s, h, d) of the group's ranks, ``counts`` rows each -> (b, sum(counts), h / ranks, d).

    Differentiable. Rows come in the order of ranks, and rank r gets the r-th part of the heads.
    """
    return _Exchange.apply(x, tuple(counts), group, True)


def heads_for_rows(x: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """The way back: (b, sum(counts), h / ranks, d) -> (b, s, h, d)."""
    return _Exchange.apply(x, tuple(counts), group, False)


def repeated_heads(x: Tensor, ranks: int) -> Tensor:
    """Heads of keys, each so often that the ranks can share them; their gradients add up.

    With as many as the least common multiple, each rank gets those that its queries use.
    """
    heads = x.shape[2]
    times = math.lcm(heads, ranks) // heads
    return x if times == 1 else x.repeat_interleave(times, dim=2)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, counts: tuple[int, ...], group, gather: bool) -> Tensor:
        ctx.counts, ctx.group, ctx.gather = counts, group, gather
        return (_to_heads if gather else _to_rows)(x, counts, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        back = _Exchange.apply(gradient, ctx.counts, ctx.group, not ctx.gather)
        return back, None, None, None


def _to_heads(x: Tensor, counts: tuple[int, ...], group) -> Tensor:
    """(b, s, h, d) -> (b, sum(counts), h / ranks, d)"""
    ranks, (b, s, h, d) = len(counts), x.shape
    by_rank = x.view(b, s, ranks, h // ranks, d).permute(2, 1, 0, 3, 4).contiguous()
    row = b * (h // ranks) * d
    received = x.new_empty(sum(counts) * row)
    sizes = [count * row for count in counts]
    dist.all_to_all_single(received, by_rank.flatten(), sizes, [s * row] * ranks, group=group)
    return _rows_first(received.view(-1, b, h // ranks, d))


def _to_rows(x: Tensor, counts: tuple[int, ...], group) -> Tensor:
    """(b, sum(counts), h / ranks, d) -> (b, s, h, d)"""
    ranks, (b, _, h, d) = len(counts), x.shape
    mine = counts[dist.get_rank(group)]
    rows, row = x.transpose(0, 1).contiguous(), b * h * d
    received = x.new_empty(ranks * mine * row)
    sizes = [count * row for count in counts]
    dist.all_to_all_single(received, rows.flatten(), [mine * row] * ranks, sizes, group=group)
    by_rank = received.view(ranks, mine, b, h, d)
    return by_rank.permute(2, 1, 0, 3, 4).reshape(b, mine, ranks * h, d)


def _rows_first(x: Tensor) -> Tensor:
    """(s, b, h, d) -> (b, s, h, d), contiguous; no copy of a batch of one."""
    return x.transpose(0, 1).contiguous()
