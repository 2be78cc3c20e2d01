"""Steps of an engine for attention alone: mixed batches over a paged cache, and their reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from compare import assert_accurate
from reference import attention_ref, standard_attention, varlen_ref
from test_demo import small_model
from torch import Tensor

from examples.serve import Engine, Request, serve
from flash_attn.cpu.fp8 import decoded, encoded
from flash_attn.dispatch import calls

NAN = float("nan")
HEADS, DIM = 4, 64

# (tokens before the step, tokens of the step): a prompt, a chunk of one, a single token, a draft.
MIXED = [(0, 37), (50, 20), (70, 1), (3, 4)]
TOKENS = [(40, 1), (0, 1), (129, 1)]
LATER = [(7, 1), (88, 1)]  # in a graph of TOKENS

# What the example's engine is asked to go on with; with 9 pages of 8 tokens some are evicted.
TEXTS = [b"def f(", b"class A:\n    def __init__(self", b"import os", b"x" * 40, b"return "]


@dataclass
class Sequences:
    """Keys and values (tokens, heads_kv, d) of each sequence, where they lie, and the queries."""

    lengths: list[tuple[int, int]]
    q: Tensor  # (tokens of the step, heads, d)
    k: list[Tensor]
    v: list[Tensor]
    pages: list[list[int]]

    @classmethod
    def of(cls, lengths, heads_kv: int, page: int, device, dtype=torch.bfloat16) -> Sequences:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape).to(dtype).to(device)

        totals = [old + new for old, new in lengths]
        counts = [-(-n // page) for n in totals]
        order = (1 + torch.randperm(sum(counts))).tolist()  # page 0 is of no sequence
        pages = [[order.pop() for _ in range(n)] for n in counts]
        q = randn(sum(new for _, new in lengths), HEADS, DIM)
        k, v = ([randn(n, heads_kv, DIM) for n in totals] for _ in "kv")
        return cls(lengths, q, k, v, pages)

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(new for _, new in self.lengths)]

    @property
    def totals(self) -> list[int]:
        return [old + new for old, new in self.lengths]

    def new(self, parts: list[Tensor]) -> Tensor:
        """(tokens of the step, heads_kv, d), of k or v."""
        return torch.cat([x[old:] for x, (old, _) in zip(parts, self.lengths, strict=True)])

    def slots(self, page: int, old: bool) -> list[int]:
        """Of the tokens before the step, or of those of the step."""
        ends = [(0, n) if old else (n, n + new) for n, new in self.lengths]
        return [
            pages[i // page] * page + i % page
            for pages, (begin, end) in zip(self.pages, ends, strict=True)
            for i in range(begin, end)
        ]

    def old(self, parts: list[Tensor]) -> Tensor:
        """(tokens before the step, heads_kv, d)."""
        return torch.cat([x[:old] for x, (old, _) in zip(parts, self.lengths, strict=True)])

    def table(self, width: int, stale: int) -> list[list[int]]:
        """Pages, and after them what an engine has left there."""
        return [p + [stale] * (width - len(p)) for p in self.pages]

    def assert_attended(self, out: Tensor, **scores) -> None:
        """out (tokens of the step, heads, d) against float64."""
        cu_k = [0, *accumulate(self.totals)]
        inputs = self.q, torch.cat(self.k), torch.cat(self.v), self.starts, cu_k
        ref, std = (
            varlen_ref(f, *inputs, causal=True, **scores)[0]
            for f in (attention_ref, standard_attention)
        )
        assert_accurate("out", out, ref, std)


# What codes are multiplied by, of k and v: of a layer, and of each of two KV heads. Powers of two,
# so that keys and values are numbers of bf16, too.
SCALES = {
    "of a layer": (torch.tensor(0.5), torch.tensor(0.125)),
    "of heads": (torch.tensor([0.5, 0.0625]), torch.tensor([0.25, 1.0])),
}


def stored(seqs: Sequences, scales: tuple, new: bool = True) -> Sequences:
    """What a cache of codes makes of the keys and values, of those of the step too if new."""

    def store(parts: list[Tensor], scale: Tensor | float | None) -> list[Tensor]:
        scale = torch.as_tensor(1.0 if scale is None else scale).to(seqs.q.device)
        rows = [decoded(encoded(x, scale), scale, x.dtype) for x in parts]
        if not new:
            for row, x, (old, _) in zip(rows, parts, seqs.lengths, strict=True):
                row[old:] = x[old:]
        return rows

    return replace(seqs, k=store(seqs.k, scales[0]), v=store(seqs.v, scales[1]))


def asked_of_kernels(monkeypatch: pytest.MonkeyPatch) -> list:
    """The calls that reach an operation from now on, as ``call.Forward``."""
    asked, forward = [], calls.forward
    monkeypatch.setattr(calls, "forward", lambda call: asked.append(call) or forward(call))
    return asked


def assert_same_text(served: Callable[..., Engine], pages: int) -> None:
    """Prefill, chunked prefill, decode and mixed steps, one after the other, against the example's
    own engine; 9 pages are too few for all requests."""
    model, written = small_model(), []
    for kind in (Engine, served):
        engine = kind(model, pages, 8, torch.float32, 16)
        requests = [Request(text, new_tokens=10 + 3 * i) for i, text in enumerate(TEXTS)]
        serve(engine, requests)
        written.append([r.text for r in requests])
        assert (engine.evictions > 0) == (pages == 9)
    assert written[0] == written[1]
