"""A problem as a call on random inputs, past autograd and its host time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.regret.problems import Problem
from flash_attn.dispatch import ops


def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


class _Maker:
    def __init__(self, problem: Problem, device: torch.device):
        self.problem, self.device = problem, device
        self.scale = problem.head_dim**-0.5
        self.right = 0 if problem.causal else -1

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """k, v (pages, page, hk, d) in an order of chance, and the table (b, most)."""
        p = self.problem
        counts = [-(-n // p.page) for n in p.keys]
        order = torch.randperm(sum(counts), device=self.device).int()
        table = torch.zeros(p.batch, max(counts), dtype=torch.int32, device=self.device)
        for row, pages in zip(table, order.split(counts)):
            row[: len(pages)] = pages
        shape = (sum(counts), p.page, p.heads_kv)
        return self.random(*shape, p.head_dim), self.random(*shape, p.head_dim_v), table

    def cache(self) -> Callable[[], object]:
        p = self.problem
        used = torch.tensor(p.keys, dtype=torch.int32, device=self.device)
        table = None
        if p.page:
            k, v, table = self.pages()
        else:
            shape = (p.batch, p.seqlen_k, p.heads_kv)
            k, v = self.random(*shape, p.head_dim), self.random(*shape, p.head_dim_v)
        scales = {}
        if p.codes:
            k, v = (x.clamp(-8, 8).to(torch.float8_e4m3fn) for x in (k, v))
            scales = {"k_descale_all": 0.5, "v_descale_all": 0.5}
        if p.queries:
            q = self.random(sum(p.queries), p.heads_q, p.head_dim)
            ends_q, ends_k = _ends(p.queries, self.device), _ends(p.keys, self.device)
            return lambda: ops.varlen_forward(
                q, k, v, ends_q, ends_k, p.seqlen_q, max(p.keys), 0.0, self.scale, True, p.window,
                0, 0.0, None, False, table, None, used, **scales,
            )  # fmt: skip
        q = self.random(p.batch, p.seqlen_q, p.heads_q, p.head_dim)
        return lambda: ops.with_kvcache(
            q, k, v, None, None, None, None, used, None, None, table, self.scale, True, p.window,
            0, 0.0, False, None, 0, **scales,
        )  # fmt: skip

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        p = self.problem
        rows_q = (p.rows,) if p.lengths else (p.batch, p.seqlen_q)
        rows_k = (p.rows,) if p.lengths else (p.batch, p.seqlen_k)
        return (
            self.random(*rows_q, p.heads_q, p.head_dim),
            self.random(*rows_k, p.heads_kv, p.head_dim),
            self.random(*rows_k, p.heads_kv, p.head_dim_v),
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        p = self.problem
        scores = (0.0, self.scale, p.causal, p.window, self.right, 0.0, None)
        if not p.lengths:
            return lambda: ops.forward(q, k, v, *scores, False)
        ends = _ends(p.lengths, self.device)
        extent = (ends, ends, p.seqlen_q, p.seqlen_k)
        return lambda: ops.varlen_forward(q, k, v, *extent, *scores, False)

    def backward(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
        p = self.problem
        out, lse = self.forward(q, k, v)()[:2]
        tensors = (torch.randn_like(out), q, k, v, out, lse, *map(torch.empty_like, (q, k, v)))
        scores = (0.0, self.scale, p.causal, p.window, self.right, 0.0, None, p.deterministic)
        if not p.lengths:
            return lambda: ops.backward(*tensors, *scores)
        ends = _ends(p.lengths, self.device)
        extent = (ends, ends, p.seqlen_q, p.seqlen_k)
        return lambda: ops.varlen_backward(*tensors, *extent, *scores)


def make(problem: Problem, device: torch.device) -> Callable[[], object]:
    maker = _Maker(problem, device)
    if problem.direction == "cache":
        return maker.cache()
    inputs = maker.inputs()
    return maker.forward(*inputs) if problem.direction == "forward" else maker.backward(*inputs)
