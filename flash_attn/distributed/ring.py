"""Keys and values travel while attention runs.

In step i rank r computes with the keys of rank r - i, which were sent during step i - 1, from their
owner and not from hand to hand: only what a rank sees of them travels (under a causal zigzag half
of the keys of the ranks before it; under a window what it reaches), nothing is forwarded, and what
goes back in the backward is the gradient of one step as a kernel wrote it. The owner sums these, in
the order of the steps: in half precision nothing is lost on the way, at half of what sums weigh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn.call import accumulation_dtype
from flash_attn.cpu.sinks import sink_share
from flash_attn.dispatch import autograd
from flash_attn.distributed import calls, sums
from flash_attn.distributed.calls import Plan, Rows, Scoring, ring_plan
from flash_attn.distributed.exchange import Transfer
from flash_attn.distributed.layout import Layout
from flash_attn.distributed.tiles import Mask


@dataclass(frozen=True)
class RankCall:
    """What a rank knows of a call."""

    layout: Layout
    group: dist.ProcessGroup | None
    rank: int
    mask: Mask
    scoring: Scoring
    gradient_dtype: torch.dtype | None  # of dk and dv on their way; None: the inputs'


class Ring(RankCall):
    """A call whose keys go round the ranks."""

    def plan(self, rank: int, source: int, device: torch.device) -> Plan:
        return ring_plan(self.layout, rank, source, self.mask, device)

    def neighbours(self, step: int) -> tuple[int, int]:
        """The ranks that a step's keys go to, and come from."""
        n = self.layout.ring
        return (self.rank + step) % n, (self.rank - step) % n

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Two parts are rounded once more than one; more are summed wider."""
        return accumulation_dtype(dtype) if self.layout.ring > 2 else dtype

    def send_keys(self, step: int, k: Tensor, v: Tensor) -> Transfer:
        to, source = self.neighbours(step)
        leaving = self.plan(to, self.rank, k.device).keys
        coming = self.plan(self.rank, source, k.device).keys
        sent = [x[:, leaving.start : leaving.stop] for x in (k, v)]
        received = [_empty_rows(x, len(coming)) for x in (k, v)]
        return Transfer(self.group, sent, to, received, source)

    def return_gradients(self, step: int, dk: Tensor, dv: Tensor) -> tuple[range, Transfer]:
        """Sends a step's dK and dV to their owner; returns the range of this rank's keys whose
        gradients arrive, and the transfer."""
        to, source = self.neighbours(step)
        coming = self.plan(to, self.rank, dk.device).keys
        received = [_empty_rows(x, len(coming)) for x in (dk, dv)]
        return coming, Transfer(self.group, (dk, dv), source, received, to)


def _empty_rows(x: Tensor, rows: int) -> Tensor:
    return x.new_empty((x.shape[0], rows, *x.shape[2:]))


class ShardAttention(torch.autograd.Function):
    """The backward of attention whose forward keeps q, k, v, out, lse and s_aux, and a function of
    ``Rows``, k and v that has their gradients."""

    @staticmethod
    def results(
        ctx: Any, total: sums.Attention, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """What a forward returns: out, lse (b, h, s) and, if wanted, largest logits like lse."""
        if s_aux is not None:
            total.add_sinks(s_aux)
        out, lse = total.result()
        largest = total.largest() if scoring.max_logits else None
        ctx.save_for_backward(q, k, v, out, lse, s_aux)
        ctx.set_materialize_grads(False)
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        return out, lse, largest

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 5

        def gradients(dout, dlse, q, k, v, out, lse, s_aux) -> tuple[Tensor | None, ...]:
            rows = Rows.of(dout, q, out, lse, dlse)
            ds_aux = sink_gradient(s_aux, rows) if ctx.needs_input_grad[3] else None
            return *ctx.gradients(rows, k, v), ds_aux

        return *autograd.first_derivative(gradients, dout, dlse, *ctx.saved_tensors), None


class RingAttention(ShardAttention):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, ring: Ring
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Shapes (b, s, h, d), of this rank's rows."""
        total = sums.Attention(q, v, accumulation_dtype(q.dtype), ring.sum_dtype(q.dtype))
        for step, first, keys, values in _steps(ring, k, v):
            # After the next transfers, which start before this and run beside it.
            total.merge_last(ring.sum_dtype(q.dtype))
            for call in ring.plan(ring.rank, ring.neighbours(step)[1], q.device).calls:
                total.add(call.rows, *calls.forward(call, q, keys, values, first, ring.scoring))
        ctx.gradients = partial(_gradients, ring)
        return ShardAttention.results(ctx, total, q, k, v, s_aux, ring.scoring)


def _steps(ring: Ring, k: Tensor, v: Tensor):
    """(step, first row of the keys that are there, keys, values), the next ones on their way."""
    first, keys, values = 0, k, v
    for step in range(ring.layout.ring):
        coming = None
        if step + 1 < ring.layout.ring:
            coming = ring.send_keys(step + 1, k, v)
        yield step, first, keys, values
        if coming is not None:
            keys, values = coming.wait()
            source = ring.neighbours(step + 1)[1]
            first = ring.plan(ring.rank, source, k.device).keys.start


# Numbers in q. Beside what it returns a backward keeps keys and gradients of two steps, sums in
# float32, and a kernel's own float32 sums of dQ: of all heads at once, up to this size.
AT_ONCE = 2**26


def _head_groups(ring: Ring, q: Tensor, k: Tensor) -> int:
    """A divisor of the heads of keys; the same on every rank."""
    batch, _, heads, head_dim = q.shape
    numbers = batch * max(ring.layout.shard_tokens) * heads * head_dim
    heads_k = k.shape[2]
    enough = (n for n in range(1, heads_k) if heads_k % n == 0 and n * AT_ONCE >= numbers)
    return next(enough, max(heads_k, 1))


def _gradients(ring: Ring, rows: Rows, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. A large call goes through the ring once for each of some groups of heads."""
    groups = _head_groups(ring, rows.q, k)
    if groups == 1:
        return _gradients_at_once(ring, rows, k, v)
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (rows.q, k, v)]
    step, step_k = rows.q.shape[2] // groups, k.shape[2] // groups
    for group in range(groups):
        heads, heads_k = (slice(group * n, (group + 1) * n) for n in (step, step_k))
        here = replace(ring, scoring=ring.scoring.of_heads(heads))
        keys, values = (x[:, :, heads_k] for x in (k, v))
        parts = _gradients_at_once(here, rows.of_heads(heads), keys, values)
        for whole, at, part in zip(gradients, (heads, heads_k, heads_k), parts, strict=True):
            whole[:, :, at] = part
    return tuple(gradients)


def _gradients_at_once(
    ring: Ring, rows: Rows, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = ring.sum_dtype(k.dtype)
    dq, dk, dv = (sums.Gradient(x, dtype) for x in (rows.q, k, v))
    travels = ring.gradient_dtype or k.dtype
    under_way: tuple[range, Transfer] | None = None

    def settle() -> None:
        if under_way is not None:
            at, transfer = under_way
            for total, part in zip((dk, dv), transfer.wait(), strict=True):
                if len(at):
                    total.add(at, part)

    for step, first, keys, values in _steps(ring, k, v):
        plan = ring.plan(ring.rank, ring.neighbours(step)[1], k.device)
        # A step's own sums, where its calls share keys; with one call, what the kernel wrote.
        here = [sums.Gradient(x, accumulation_dtype(k.dtype), plan.keys) for x in (keys, values)]
        for call in plan.calls:
            parts = calls.backward(call, rows, keys, values, first, ring.scoring)
            dq.add(call.rows, parts[0])
            for total, part in zip(here, parts[1:], strict=True):
                total.add(call.keys, part)
        settle()
        if step == 0:
            under_way = None
            for total, part in zip((dk, dv), here, strict=True):
                total.add(plan.keys, part.result(dtype))
        else:
            under_way = ring.return_gradients(step, *(x.result(travels) for x in here))
    settle()
    return dq.result(rows.q.dtype), dk.result(k.dtype), dv.result(v.dtype)


def sink_gradient(s_aux: Tensor, rows: Rows) -> Tensor:
    """(h,): this rank's rows' share of the sinks' gradient, -sum p_sink * (rowsum(dO · O) - dlse).

    In the order of rows, a few thousand at a time: no copy in the LSE's type is made.
    """
    lse = rows.lse
    total = torch.zeros(s_aux.shape, dtype=lse.dtype, device=lse.device)
    for start in range(0, lse.shape[-1], 2048):
        at = slice(start, start + 2048)
        delta = (rows.dout[:, at].to(lse.dtype) * rows.out[:, at]).sum(-1).transpose(1, 2)
        if rows.dlse is not None:
            delta = delta - rows.dlse[:, :, at]
        p_sink = sink_share(s_aux.view(1, -1, 1), lse[:, :, at])
        total -= torch.where(p_sink == 0, 0.0, p_sink * delta).sum((0, 2))
    return total.to(s_aux.dtype)
