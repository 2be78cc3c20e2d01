"""The op `largest_of_heads`: each head's largest logit, from its rows'."""

from __future__ import annotations

import math

from torch import Tensor


def largest_of_heads(rows: Tensor) -> Tensor:
    """(h,) of the rows' largest logits, (b, h, s) or packed (h, total)."""
    heads = rows.shape[-2]
    if rows.numel() == 0:
        return rows.new_full((heads,), -math.inf)
    return rows.amax((0, 2) if rows.dim() == 3 else 1)
