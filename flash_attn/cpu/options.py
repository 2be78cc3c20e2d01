"""Which options of a call torch's own CPU kernel can express, by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from . import native
from .scores import UNBOUNDED, Dropout, Scores

_PLAIN = Scores(softmax_scale=1.0, left=UNBOUNDED, right=UNBOUNDED)
_ANY = torch.empty(0)  # that an option is in use counts, not what it holds
_WITH_OPTION = {
    "softcap": replace(_PLAIN, softcap=1.0),
    "dropout": replace(_PLAIN, dropout=Dropout(0.5, 0, 0, head_ids=_ANY, first_blocks=_ANY)),
    "alibi": replace(_PLAIN, slopes=_ANY),
    "sinks": replace(_PLAIN, sinks=_ANY),
}


def beyond_torch(names: Iterable[str], q: Tensor) -> list[str]:
    """Those of the options that torch's kernel does not have. q: (..., d)."""
    return [
        name
        for name in names
        if name in _WITH_OPTION and not native.can_express(_WITH_OPTION[name], q, q)
    ]


def torch_takes(q: Tensor, v: Tensor) -> bool:
    """Whether torch's kernel takes q and v, (..., d) and (..., d_v), without options."""
    return native.can_express(_PLAIN, q, v)
