"""``torch.amp``'s decorators for autograd functions, as they are for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import amp

__all__ = ["custom_bwd", "custom_fwd"]

custom_fwd: Callable[..., Any] = partial(amp.custom_fwd, device_type="cuda")
custom_bwd: Callable[..., Any] = partial(amp.custom_bwd, device_type="cuda")
