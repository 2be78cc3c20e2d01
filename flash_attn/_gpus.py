"""GPUs whose plans can be asked for where there is none: what a plan depends on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MIB = 2**20


class Gpu(NamedTuple):
    sm: int  # compute capability, 10 * major + minor
    sm_count: int
    l2_bytes: int


GPUS = {
    "H200": Gpu(90, 132, 60 * _MIB),
    "H100": Gpu(90, 132, 50 * _MIB),
    "A100": Gpu(80, 108, 40 * _MIB),
    "L40S": Gpu(89, 142, 96 * _MIB),
    "RTX 4090": Gpu(89, 128, 72 * _MIB),
    "RTX 5090": Gpu(120, 170, 96 * _MIB),
    "GB10": Gpu(121, 48, 24 * _MIB),
}


def check(name: str | None) -> None:
    if name is not None and name not in GPUS:
        raise ValueError(f"gpu: got {name!r}; one of {', '.join(GPUS)} or None is needed")


def gpu_of(x: Tensor, name: str | None) -> Gpu:
    """The named one, or that of x."""
    if name is not None:
        return GPUS[name]
    major, minor = torch.cuda.get_device_capability(x.device)
    properties = torch.cuda.get_device_properties(x.device)
    return Gpu(10 * major + minor, properties.multi_processor_count, properties.L2_cache_size)
