"""GPUs whose plans can be asked for where there is none: what a plan depends on."""

from __future__ import annotations

import torch
from torch import Tensor

_MIB = 2**20

# Name: compute capability as 10 * major + minor, multiprocessors, bytes of L2.
GPUS = {
    "H200": (90, 132, 60 * _MIB),
    "H100": (90, 132, 50 * _MIB),
    "A100": (80, 108, 40 * _MIB),
    "L40S": (89, 142, 96 * _MIB),
    "RTX 4090": (89, 128, 72 * _MIB),
    "RTX 5090": (120, 170, 96 * _MIB),
    "GB10": (121, 48, 24 * _MIB),
}


def check(name: str | None) -> None:
    if name is not None and name not in GPUS:
        raise ValueError(f"gpu: got {name!r}; one of {', '.join(GPUS)} or None is needed")


def numbers_of(x: Tensor, name: str | None) -> tuple[int, int, int]:
    """As in ``GPUS``, of the named one or of x's."""
    if name is not None:
        return GPUS[name]
    major, minor = torch.cuda.get_device_capability(x.device)
    properties = torch.cuda.get_device_properties(x.device)
    return 10 * major + minor, properties.multi_processor_count, properties.L2_cache_size
