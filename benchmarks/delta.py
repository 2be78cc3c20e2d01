"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), ours and flash-linear-attention's.

Prompts in Mtok/s, and one token of each sequence in GB/s of the states beside a copy of them. Heads
are those of Qwen3-Next: 16 of q and k, which 32 of v share, with 128 columns each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.clock import Clock
from benchmarks.linear import TUNING
from benchmarks.rows import Options, Row, rate
from flash_attn.linear import chunk_gated_delta_rule, recurrent_gated_delta_rule_step

HEADS, HEADS_V, HEAD_DIM = 16, 32, 128
PROMPTS = ((16, 1024), (4, 4096), (1, 16384), (1, 65536))  # sequences and their tokens
BATCHES = (1, 16, 64, 256)


@dataclass(frozen=True)
class Delta:
    """Tensors of a call: q, k [batch, seqlen, HEADS, head_dim], v of HEADS_V, g and beta."""

    batch: int
    seqlen: int
    head_dim: int

    def __str__(self) -> str:
        return f"d{self.head_dim} b{self.batch} s{self.seqlen} h{HEADS}/{HEADS_V}"

    def inputs(self, device: torch.device) -> list[Tensor]:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def normal(heads: int, *columns: int) -> Tensor:
            return torch.randn(self.batch, self.seqlen, heads, *columns, device=device)

        q, k = (F.normalize(normal(HEADS, self.head_dim), dim=-1).to(dtype) for _ in "qk")
        g, beta = F.logsigmoid(normal(HEADS_V)) / 16, normal(HEADS_V).sigmoid()
        return [q, k, normal(HEADS_V, self.head_dim).to(dtype), g, beta]

    def states(self, device: torch.device) -> Tensor:
        return torch.randn(self.batch, HEADS_V, self.head_dim, self.head_dim, device=device)


def _fla(name: str) -> Callable:
    """flash-linear-attention's function; where it cannot be imported, one that says so."""
    try:
        return getattr(importlib.import_module("fla.ops.gated_delta_rule"), name)
    except (ImportError, AttributeError) as error:
        reason = error

    def call(*inputs: Tensor, **keywords: object) -> tuple:
        raise reason

    return call


def _dims(options: Options) -> list[int]:
    return sorted(options.dims) if options.dims else [HEAD_DIM]


def delta(options: Options) -> Iterator[Row]:
    """The forward over prompts, Mtok/s."""
    clock, theirs = Clock(options.device), _fla("chunk_gated_delta_rule")
    for d in _dims(options):
        for batch, seqlen in PROMPTS:
            if options.seqlens and seqlen not in options.seqlens:
                continue
            problem = Delta(batch, seqlen, d)
            q, k, v, g, beta = problem.inputs(options.device)
            keywords = dict(q=q, k=k, v=v, g=g, beta=beta)
            calls = {
                "ours": lambda keywords=keywords: chunk_gated_delta_rule(**keywords),
                "fla": lambda keywords=keywords: theirs(**keywords),
            }
            times = clock.measure(calls, min_samples=5, warm_ups={"fla": TUNING})
            rates = rate(batch * seqlen, 1e6, times)
            yield Row("delta", f"delta {problem}", "Mtok/s", times, rates, clock.missing)


def delta_step(options: Options) -> Iterator[Row]:
    """GB/s of the states; ours over the copy's is the share of its bandwidth."""
    clock, theirs = Clock(options.device, clean=True), _fla("fused_recurrent_gated_delta_rule")
    for d in _dims(options):
        for batch in BATCHES:
            problem = Delta(batch, 1, d)
            inputs, state = problem.inputs(options.device), problem.states(options.device)
            row, target = [x[:, 0] for x in inputs], torch.empty_like(state)
            keywords = dict(zip(("q", "k", "v", "g", "beta"), inputs), initial_state=state)
            calls = {
                "ours": lambda row=row, state=state: recurrent_gated_delta_rule_step(*row, state),
                "copy": lambda state=state, target=target: target.copy_(state),
                "fla": lambda given=keywords: theirs(**given, output_final_state=True),
            }
            times = clock.measure(calls, warm_ups={"fla": TUNING})
            rates = rate(8 * state.numel(), 1e9, times)
            yield Row("delta_step", f"delta_step {problem}", "GB/s", times, rates, clock.missing)
