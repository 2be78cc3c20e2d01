"""The op `merge_attention`: two results over disjoint keys as one, in place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .common import ROWS


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """out (b, rows, h, dv), lse (b, h, rows); overwrites out_a and lse_a."""
    lse = torch.logaddexp(lse_a, lse_b)
    # exp(-inf - -inf): part b has no share in a row that it does not see.
    share = (lse_b - lse).exp_().masked_fill_(lse_b == -math.inf, 0.0)
    share = share.transpose(1, 2).unsqueeze(-1)  # (b, rows, h, 1)
    for start in range(0, out_a.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        mine, weight = out_a[:, rows], share[:, rows]
        difference = (out_b[:, rows] - mine.to(lse.dtype)).mul_(weight)
        # 0 times a NaN of a row that counts for nothing
        mine.add_(difference.masked_fill_(weight == 0, 0.0))
    lse_a.copy_(lse)
