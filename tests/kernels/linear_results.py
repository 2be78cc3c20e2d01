"""Results of linear attention's kernels that begin as NaN: a test sees what is not written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn.linear import _k_tiles, _kernels, ops


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of sequences, and states; tokens of no sequence stay zeros."""
    written, empty = _k_tiles._written, ops.empty_state

    def poisoned(like: Tensor, cu_seqlens: Tensor | None, *rest, **keywords) -> Tensor:
        out = written(like, cu_seqlens, *rest, **keywords)
        first, last = (0, None) if cu_seqlens is None else cu_seqlens[[0, -1]].tolist()
        out[:, first:last] = torch.nan
        return out

    monkeypatch.setattr(_k_tiles, "_written", poisoned)
    monkeypatch.setattr(ops, "empty_state", lambda *args: empty(*args).fill_(torch.nan))


def poison_gradients(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Results of the backward as well. Returns tokens of each call of its kernels, as they come."""
    taken: list[int] = []

    def backward(*args):
        for out in args[9:]:
            if out is not None and args[5] is None:
                out.fill_(torch.nan)
        taken.append(args[0].shape[1])
        kernel(*args)

    kernel = _kernels.backward
    monkeypatch.setattr(_kernels, "backward", backward)
    poison(monkeypatch)
    return taken
