"""Attention beside the families that are linear in the sequence: GLA and Mamba 2, ours and others'.

Gated linear attention (Yang et al. 2024, arXiv:2312.06635) comes from flash-linear-attention, Mamba
2 (Dao & Gu 2024, arXiv:2405.21060) from mamba_ssm or, where that cannot be imported, as the simple
GLA of flash-linear-attention: the same recurrence, whose state decays by one number per head and
token.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import flash_attn
import flash_attn.linear
from benchmarks.clock import Clock
from benchmarks.rows import Options, Row, rate

HIDDEN = 2048
HEAD_DIMS = (32, 64, 128, 256, 512, 1024)
SEQLENS = tuple(1024 << i for i in range(7))
TUNING = 100  # calls before the first sample of a contender that tunes itself
STEPS = ("fwd", "fwd+bwd")
HEAD_DIM, SEQLEN = "head_dim", "seqlen"


@dataclass(frozen=True)
class Linear:
    """One layer's mixing of tokens, causal: heads of v are (batch, seqlen, heads, head_dim)."""

    axis: str
    batch: int
    seqlen: int
    head_dim: int
    expand_k: float  # columns of q and k of the others, for each of v; attention has as many

    def __str__(self) -> str:
        return f"d{self.head_dim} b{self.batch} s{self.seqlen} h{self.heads} k{self.head_dim_k}"

    @property
    def heads(self) -> int:
        return max(1, HIDDEN // self.head_dim)

    @property
    def head_dim_k(self) -> int:
        return int(self.expand_k * self.head_dim)

    @property
    def x(self) -> int:
        return self.head_dim if self.axis == HEAD_DIM else self.seqlen

    def normal(self, device: torch.device, *columns: int) -> Tensor:
        shape = (self.batch, self.seqlen, self.heads, *columns)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return torch.randn(shape, device=device, dtype=dtype)

    def attention_inputs(self, device: torch.device) -> list[Tensor]:
        return [self.normal(device, self.head_dim) for _ in "qkv"]

    def gated_inputs(self, device: torch.device, gates: tuple[int, ...]) -> list[Tensor]:
        """q, k, v and the logarithms of decays, for each column of k or one for all."""
        q, k = (self.normal(device, self.head_dim_k) for _ in "qk")
        decay = torch.nn.functional.logsigmoid(self.normal(device, *gates).float()) / 16
        return [q, k, self.normal(device, self.head_dim), decay.to(q.dtype) if gates else decay]


def grid(options: Options) -> Iterator[Linear]:
    for d in HEAD_DIMS if not options.dims else sorted(options.dims):
        yield Linear(HEAD_DIM, 4, 4096, d, options.expand_k)
    for s in SEQLENS:
        if not options.seqlens or s in options.seqlens:
            yield Linear(SEQLEN, max(1, 16384 // s), s, 128, options.expand_k)


OURS = ("simple_gla", "gla")  # decays of a head, and of each column of k

# How each of flash-linear-attention's kinds of GLA calls its gate.
GATES = {"chunk": "g", "fused_chunk": "g", "fused_recurrent": "gk"}

# A contender: its inputs for a problem, and the call that gets them.
_Contender = tuple[Callable[[Linear, torch.device], list[Tensor]], Callable[..., Tensor]]


def _ours() -> _Contender:
    def call(*inputs: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(*inputs, causal=True)

    return Linear.attention_inputs, call


def _gla(kind: str) -> _Contender:
    mix = getattr(importlib.import_module("fla.ops.gla"), f"{kind}_gla")

    def inputs(problem: Linear, device: torch.device) -> list[Tensor]:
        return problem.gated_inputs(device, (problem.head_dim_k,))

    def call(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        # Keywords: the stub of a removed kind takes nothing else, and says that it is gone.
        return mix(q=q, k=k, v=v, **{GATES[kind]: gate})[0]

    return inputs, call


def _ours_linear(name: str) -> _Contender:
    mix = getattr(flash_attn.linear, f"chunk_{name}")

    def inputs(problem: Linear, device: torch.device) -> list[Tensor]:
        gates = (problem.head_dim_k,) if name == "gla" else ()
        return problem.gated_inputs(device, gates)

    return inputs, lambda *tensors: mix(*tensors)[0]


def _one_decay_a_head(problem: Linear, device: torch.device) -> list[Tensor]:
    return problem.gated_inputs(device, ())


def _mamba2() -> _Contender:
    ssd = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")

    def call(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        rate = -torch.ones(v.shape[2], device=v.device)
        return ssd.mamba_chunk_scan_combined(v, -decay, rate, k, q, chunk_size=256)

    return _one_decay_a_head, call


def _simple_gla() -> _Contender:
    mix = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    return _one_decay_a_head, lambda *tensors: mix(*tensors)[0]


def _found(make: Callable[..., _Contender], *args: str) -> _Contender:
    """The contender; where it cannot be imported, one that says so when it is called."""
    try:
        return make(*args)
    except (ImportError, AttributeError) as error:
        reason = error

    def call(*inputs: Tensor) -> Tensor:
        raise reason

    return lambda problem, device: [], call


def contenders() -> dict[str, _Contender]:
    chosen = {"ours": _ours()}
    chosen |= {f"our {kind.replace('_', ' ')}": _ours_linear(kind) for kind in OURS}
    for kind in GATES:
        chosen[f"gla {kind}"] = _found(_gla, kind)
    try:
        return chosen | {"mamba2": _mamba2()}
    except ImportError:
        return chosen | {"simple gla": _found(_simple_gla)}


def _step(what: str, contender: _Contender, problem: Linear, device: torch.device) -> Callable:
    inputs, mix = contender[0](problem, device), contender[1]
    if what == "fwd":
        return lambda: mix(*inputs)
    inputs = [x.requires_grad_() for x in inputs]
    dout = problem.normal(device, problem.head_dim)
    return lambda: torch.autograd.grad(mix(*inputs), inputs, dout)


def linear(options: Options) -> Iterator[Row]:
    """Millions of tokens a second: libraries count operations differently."""
    clock, chosen = Clock(options.device), contenders()
    warm_ups = {name: TUNING for name in chosen if not name.startswith("our")}
    for problem, what in itertools.product(grid(options), STEPS):
        steps = {name: _step(what, c, problem, options.device) for name, c in chosen.items()}
        times = clock.measure(steps, min_samples=5, warm_ups=warm_ups)
        rates = rate(problem.batch * problem.seqlen, 1e6, times)
        place = {"axis": problem.axis, "x": problem.x}
        yield Row("linear", f"{what} {problem}", "Mtok/s", times, rates, clock.missing, **place)


def crossings(rows: list[Row]) -> list[str]:
    """For every kind of call and every other contender, where its curve crosses ours."""
    kinds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        mine = row.milliseconds.get("ours") if row.preset == "linear" else None
        for name, theirs in row.milliseconds.items():
            if mine and theirs and name != "ours":
                kinds.setdefault((row.kind, name), []).append((row.x, theirs / mine))
    return [f"{kind}: {_told(name, points)}" for (kind, name), points in kinds.items()]


def _told(name: str, points: list[tuple[float, float]]) -> str:
    """points: x, and their time over ours."""
    points = sorted(points)
    ends = " and ".join(f"{ratio:.2f} at {x:g}" for x, ratio in (points[0], points[-1]))
    places = [
        _crossing(before, after)
        for before, after in itertools.pairwise(points)
        if (before[1] > 1) != (after[1] > 1)
    ]
    if not places:
        who = "ours is" if points[0][1] > 1 else f"{name} is"
        return f"{who} faster at every size both do; time of {name} / ours is {ends}"
    found = ", ".join(f"{place:,.0f}" for place in places)
    return f"{name} and ours cross at {found}; time of {name} / ours is {ends}"


def _crossing(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Where the line through both, in logarithms, is 1."""
    (x, ratio), (next_x, next_ratio) = before, after
    share = math.log(ratio) / (math.log(ratio) - math.log(next_ratio))
    return x * (next_x / x) ** share
