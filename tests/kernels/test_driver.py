"""What the host does about CUDA's driver: its context, and its errors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from flash_attn import flash_attn_func
from tests.kernels import library

ILLEGAL_ADDRESS = 700


@pytest.fixture
def broken_driver(monkeypatch) -> Iterator[None]:
    with library.serving(monkeypatch, 90):
        driver = ctypes.CDLL(library._path)
        driver.break_driver(ILLEGAL_ADDRESS)
        yield
        driver.break_driver(0)


def test_a_failure_of_the_driver_has_its_name(broken_driver):
    """Not a ValueError: no argument is wrong."""
    q = torch.randn(1, 100, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS: no TMA descriptor") as e:
        flash_attn_func(q, q, q)
    assert e.type is RuntimeError


def test_outputs_that_do_not_fit_in_memory(monkeypatch):
    """128 TiB of them, of a few bytes of inputs. Training loops catch torch's own error."""
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, 2**24, 2**16, 64)
    with (
        library.serving(monkeypatch, 90),
        pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory.*140737488355328 bytes"),
    ):
        flash_attn_func(q, q, q)
