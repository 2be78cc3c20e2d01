"""Sums in fp32 under autocast, which would round the factors of torch's matrix products."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

__all__ = ["without_autocast"]


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """A context in which autocast leaves operations on x's device as they are."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
