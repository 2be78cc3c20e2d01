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
    memory_rate: int  # bytes that memory moves in a µs, by the datasheet; 0: unknown


# An A100 of 80 GB.
GPUS = {
    "H200": Gpu(90, 132, 60 * _MIB, 4_813_000),
    "H100": Gpu(90, 132, 50 * _MIB, 3_352_000),
    "A100": Gpu(80, 108, 40 * _MIB, 2_039_000),
    "L40S": Gpu(89, 142, 96 * _MIB, 864_000),
    "RTX 4090": Gpu(89, 128, 72 * _MIB, 1_008_000),
    "RTX 5090": Gpu(120, 170, 96 * _MIB, 1_792_000),
    "GB10": Gpu(121, 48, 24 * _MIB, 273_000),
}


def check(name: str | None) -> None:
    if name is not None and name not in GPUS:
        raise ValueError(f"gpu: got {name!r}; one of {', '.join(GPUS)} or None is needed")


def numbers_of(x: Tensor, name: str | None) -> Gpu:
    """The numbers of the named GPU, or of x's."""
    return GPUS[name] if name is not None else of_device(x.device)


def of_device(device: torch.device) -> Gpu:
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    # kHz, of two transfers each, and bits; torch has them since 2.8.
    clock = getattr(properties, "memory_clock_rate", 0)
    rate = clock * 2 * getattr(properties, "memory_bus_width", 0) // 8000
    return Gpu(10 * major + minor, properties.multi_processor_count, properties.L2_cache_size, rate)
