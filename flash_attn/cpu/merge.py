"""The op `merge_attention`: two results over disjoint keys as one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .common import ROWS


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out: Tensor | None = None
) -> None:
    """out (b, rows, h, dv), lse (b, h, rows); overwrites lse_a, and out_a unless there is out."""
    out = out_a if out is None else out
    lse = torch.logaddexp(lse_a, lse_b)
    # Differences of infinities are NaN. Part b has no share in a row that it does not see, and a
    # part whose sink takes all has all of it.
    share = (lse_b - lse).exp_().masked_fill_(lse_b == -math.inf, 0.0)
    share.masked_fill_(lse_b == math.inf, 1.0)
    share = share.transpose(1, 2).unsqueeze(-1)  # (b, rows, h, 1)
    for start in range(0, out_a.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        mine, weight = out_a[:, rows].to(lse.dtype), share[:, rows]
        difference = (out_b[:, rows] - mine).mul_(weight)
        # 0 times a NaN of a row that counts for nothing
        out[:, rows] = difference.masked_fill_(weight == 0, 0.0).add_(mine)
    lse_a.copy_(lse)
