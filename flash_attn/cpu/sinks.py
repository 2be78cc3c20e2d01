"""Attention sinks, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sink_share(s_aux: Tensor, lse: Tensor) -> Tensor:
    """A sink's share of each row's softmax denominator, as far as a gradient asks for it.

    Sinks and LSE of the same head broadcast against each other; the result has LSE's dtype. It is 0
    in a row that saw nothing, not even a sink (LSE -inf), and where a sink of +inf takes all of the
    weight wherever it moves to.
    """
    s_aux = s_aux.to(lse.dtype)
    none = (lse == -math.inf) | (s_aux == math.inf)
    return torch.where(none, 0.0, (s_aux - lse).exp_())
