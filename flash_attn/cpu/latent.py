"""Latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys are the values and more columns.

A cache holds a latent row for each token, which is the value, and a row that was rotated; both are
the key. So a score is ``qv · v + q · k``: that of one query and one key, of all columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def queries(q: Tensor, qv: Tensor | None) -> Tensor:
    """(…, h, dv + d) of q (…, h, d) and qv (…, h, dv); q where there is no qv."""
    return q if qv is None else torch.cat([qv.to(q.dtype), q], -1)


def keys(k: Tensor, v: Tensor) -> Tensor:
    """(…, hk, dv + d) of k (…, hk, d) and v (…, hk, dv)."""
    return torch.cat([v, k], -1)
