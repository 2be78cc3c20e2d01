"""One token of each sequence through linear attention, beside a copy of the states it moves."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.clock import Clock
from benchmarks.linear import GATES, HEAD_DIMS, HIDDEN, TUNING
from benchmarks.rows import Options, Row, rate
from flash_attn.linear import recurrent_step

BATCHES = (1, 16, 64, 256)
DECAYS = ("scalar", "gla")


@dataclass(frozen=True)
class Step:
    """States [batch, heads, head_dim_k, head_dim] in fp32, with a decay for each or each row."""

    decay: str
    batch: int
    head_dim: int
    head_dim_k: int

    def __str__(self) -> str:
        return f"{self.decay} d{self.head_dim} k{self.head_dim_k} b{self.batch} h{self.heads}"

    @property
    def heads(self) -> int:
        return max(1, HIDDEN // self.head_dim)

    @property
    def moved(self) -> int:
        """Bytes of the states, read and written."""
        return 8 * self.batch * self.heads * self.head_dim_k * self.head_dim

    def inputs(self, device: torch.device) -> list[Tensor]:
        """q, k [batch, heads, head_dim_k], v, log decays and states."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        lead, k_dim = (self.batch, self.heads), self.head_dim_k

        def normal(*columns: int) -> Tensor:
            return torch.randn(*lead, *columns, device=device)

        g = -normal(*(k_dim,) * (self.decay == "gla")).abs() / 16
        return [*(normal(d).to(dtype) for d in (k_dim, k_dim, self.head_dim)), g,
                normal(k_dim, self.head_dim)]  # fmt: skip


def grid(options: Options) -> Iterator[Step]:
    dims = sorted(options.dims) if options.dims else HEAD_DIMS
    for decay, d in itertools.product(DECAYS, dims):
        for batch in BATCHES if d == 128 else BATCHES[2:3]:
            yield Step(decay, batch, d, max(1, int(options.expand_k * d)))


def _fla(decay: str) -> Callable:
    """flash-linear-attention's recurrence of one token, which returns the states that it made."""
    name, gate = ("gla", GATES["fused_recurrent"]) if decay == "gla" else ("simple_gla", "g")
    mix = getattr(importlib.import_module(f"fla.ops.{name}"), f"fused_recurrent_{name}")

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Tensor:
        q, k, v, g = (x[:, None] for x in (q, k, v, g))
        return mix(q=q, k=k, v=v, **{gate: g}, initial_state=state, output_final_state=True)

    return call


def _mamba(decay: str) -> Callable:
    """mamba_ssm's step, whose states are [batch, heads, head_dim, head_dim_k]: as many bytes."""
    if decay != "scalar":
        raise NotImplementedError("mamba_ssm has one decay a head")
    update = importlib.import_module(
        "mamba_ssm.ops.triton.selective_state_update"
    ).selective_state_update

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Tensor:
        heads, d, k_dim = v.shape[1], v.shape[2], q.shape[2]
        rates = -torch.ones(heads, device=v.device)[:, None, None].expand(-1, d, k_dim)
        turned = state.view(len(v), heads, d, k_dim)
        return update(turned, v, -g[..., None].expand(-1, -1, d), rates, k, q)

    return call


def _peer(make: Callable, decay: str) -> Callable:
    """The peer; where it cannot be had, a call that says so."""
    try:
        return make(decay)
    except (ImportError, AttributeError, NotImplementedError) as error:
        reason = error

    def call(*inputs: Tensor) -> Tensor:
        raise reason

    return call


def linear_step(options: Options) -> Iterator[Row]:
    """GB/s of the states; ours over the copy's is the share of its bandwidth."""
    clock = Clock(options.device, clean=True)
    for problem in grid(options):
        inputs = problem.inputs(options.device)
        target = torch.empty_like(inputs[-1])
        calls = {
            "ours": lambda inputs=inputs: recurrent_step(*inputs),
            "copy": lambda state=inputs[-1], target=target: target.copy_(state),
        }
        for name, make in (("fla", _fla), ("mamba_ssm", _mamba)):
            peer = _peer(make, problem.decay)
            calls[name] = lambda peer=peer, inputs=inputs: peer(*inputs)
        warm_ups = {"fla": TUNING, "mamba_ssm": TUNING}
        times = clock.measure(calls, warm_ups=warm_ups)
        rates = rate(problem.moved, 1e9, times)
        yield Row("linear_step", f"linear_step {problem}", "GB/s", times, rates, clock.missing)
