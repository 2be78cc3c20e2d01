"""All keys and values on every rank, each computing its own rows: for many packed sequences.

One collective there and one back, and then one call of a kernel, however many sequences there are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn.call import accumulation_dtype
from flash_attn.distributed import calls, sums
from flash_attn.distributed.calls import Plan, Rows, whole_plan
from flash_attn.distributed.layout import Layout
from flash_attn.distributed.ring import RankCall, ShardAttention
from flash_attn.distributed.shard import gather_rows, global_order


class Gather(RankCall):
    """A call for which each rank gets all keys."""

    def plan(self, device: torch.device) -> Plan:
        return whole_plan(self.layout, self.rank, self.mask, device)


@functools.lru_cache(maxsize=256)
def _orders(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """(total,) int64 each: from the ranks' order to that of the whole and back; None: the same."""
    order = global_order(layout, device)
    if bool((order[1:] > order[:-1]).all()):
        return None
    return order, order.argsort()


def _gather(x: Tensor, layout: Layout, group: dist.ProcessGroup | None) -> Tensor:
    """(b, s, h, d) of each rank -> (b, total, h, d)"""
    rows = gather_rows(x.transpose(0, 1), list(layout.shard_tokens), group)
    orders = _orders(layout, x.device)
    return (rows if orders is None else rows[orders[0]]).transpose(0, 1)


def _scatter(x: Tensor, like: Tensor, job: Gather) -> Tensor:
    """Gradients (b, total, h, d) of each rank -> their sum for this rank's keys (b, s, h, d).

    Summed here and in the order of ranks, in the LSE's type: repeatable, whatever the backend.
    """
    layout, rows = job.layout, x.transpose(0, 1)
    orders = _orders(layout, x.device)
    rows = rows.contiguous() if orders is None else rows[orders[1]]
    counts, mine = list(layout.shard_tokens), like.shape[1]
    received = rows.new_empty(layout.ring * mine, *rows.shape[1:])
    dist.all_to_all_single(received, rows, [mine] * layout.ring, counts, group=job.group)
    total = received.unflatten(0, (layout.ring, mine)).sum(0, dtype=accumulation_dtype(like.dtype))
    return total.to(like.dtype).transpose(0, 1)


class GatherAttention(ShardAttention):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, job: Gather
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Shapes (b, s, h, d), of this rank's rows."""
        total = sums.Attention(q, v, accumulation_dtype(q.dtype), q.dtype)
        keys, values = (_gather(x, job.layout, job.group) for x in (k, v))
        for call in job.plan(q.device).calls:
            total.add(call.rows, *calls.forward(call, q, keys, values, 0, job.scoring))
        ctx.gradients = functools.partial(_gradients, job)
        return ShardAttention.results(ctx, total, q, k, v, s_aux, job.scoring)


def _gradients(job: Gather, rows: Rows, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Gathered again: kept, they would be the memory that cutting the sequence saves.
    keys, values = (_gather(x, job.layout, job.group) for x in (k, v))
    sum_dtype = accumulation_dtype(k.dtype)
    dq, dk, dv = (sums.Gradient(x, sum_dtype) for x in (rows.q, keys, values))
    for call in job.plan(k.device).calls:
        parts = calls.backward(call, rows, keys, values, 0, job.scoring)
        for total, at, part in zip((dq, dk, dv), (call.rows, call.keys, call.keys), parts):
            total.add(at, part)
    travels = job.gradient_dtype or k.dtype
    mine = (_scatter(total.result(travels), like, job) for total, like in ((dk, k), (dv, v)))
    return dq.result(rows.q.dtype), *mine
