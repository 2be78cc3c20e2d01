"""Results of linear attention's kernels that begin as NaN: a test sees what is not written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flash_attn.linear import _k_tiles, _kernels, chunk_scan, ops


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of sequences, and states; tokens of no sequence stay zeros."""
    written, empty = _k_tiles.written, ops.empty_state

    def poisoned(like: Tensor, cu_seqlens: Tensor | None, *rest, **keywords) -> Tensor:
        out = written(like, cu_seqlens, *rest, **keywords)
        first, last = (0, None) if cu_seqlens is None else cu_seqlens[[0, -1]].tolist()
        out[:, first:last] = torch.nan
        return out

    monkeypatch.setattr(_k_tiles, "written", poisoned)
    monkeypatch.setattr(ops, "empty_state", lambda *args: empty(*args).fill_(torch.nan))


def _taken(monkeypatch: pytest.MonkeyPatch, name: str, look: Callable[..., int]) -> list[int]:
    """What `look` makes of the arguments of each call of a kernel, before it, as they come."""
    taken: list[int] = []

    def call(*args):
        taken.append(look(*args))
        kernel(*args)

    kernel = getattr(_kernels, name)
    monkeypatch.setattr(_kernels, name, call)
    return taken


def poison_forward(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Returns tokens of each call of the forward's kernels, as they come."""
    poison(monkeypatch)
    return _taken(monkeypatch, name, lambda q, *_: q.shape[1])


def poison_gradients(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Results of the backward as well. Returns tokens of each call of its kernels, as they come."""

    def look(*args) -> int:
        for out in args[9:]:
            if out is not None and args[5] is None:
                out.fill_(torch.nan)
        return args[0].shape[1]

    poison(monkeypatch)
    return _taken(monkeypatch, "backward", look)


def poison_step(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """o of a step. Returns rows of each call of its kernel, as they come."""

    def look(*args) -> int:
        args[-1].fill_(torch.nan)
        return len(args[0])

    return _taken(monkeypatch, name, look)


def check_neighbours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor) -> None:
    """A sequence of 200 tokens between others has the gradients that it has alone."""

    def gradients(begin: int, end: int, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        own = [x[:, begin:end].detach().requires_grad_() for x in (q, k, v, g)]
        o, _ = chunk_scan(*own, cu_seqlens=cu_seqlens)
        return torch.autograd.grad(o, own, do[:, begin:end])

    edges = torch.tensor([0, 37, 237, 300])
    for of_all, alone in zip(gradients(0, 300, edges), gradients(37, 237, None), strict=True):
        assert torch.equal(of_all[:, 37:237], alone)
