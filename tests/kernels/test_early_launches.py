"""No other call's launches come between those of a call, whichever threads call."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from types import ModuleType

import pytest
import torch

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_backward
from tests.kernels import library
from tests.unit import launch_model

BF16 = torch.bfloat16


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=BF16)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def calls() -> dict[str, Callable[[], object]]:
    """By the names of launch_model, for a Hopper GPU of three multiprocessors."""
    q, few = randn(1, 400, 2, 64), randn(1, 90, 2, 64)
    kv = randn(1, 2000, 1, 64)
    rows, lse = randn(1, 100, 2, 64), torch.zeros(1, 2, 100)
    gradients = [torch.empty_like(x) for x in (rows, q, q)]
    packed, pages = randn(401, 2, 64), randn(60, 16, 2, 64)
    starts, used = ints(0, 1, 401), ints(300, 400)
    table = torch.arange(60, dtype=torch.int32).view(2, 30)
    many_pages = randn(800, 16, 2, 64)
    wide_table = torch.arange(800, dtype=torch.int32).view(2, 400)

    def backward() -> None:
        softcap = 20.0  # has one schedule, tiles
        _flash_attn_backward(rows, rows, q, q, rows, lse, *gradients, 0.0, 0.125, True, -1, -1,
                             softcap, None, False)  # fmt: skip

    def beside() -> None:
        flash_attn_varlen_func(packed, many_pages, many_pages, starts, ints(0, 6000, 12000), 400,
                               6400, causal=True, block_table=wide_table)  # fmt: skip

    return {
        "plain": lambda: flash_attn_func(q, q, q, causal=True),
        "largest": lambda: flash_attn_func(q, q, q, causal=True, return_max_logits=True),
        "in_parts": lambda: flash_attn_func(few, kv, kv),
        "beside": beside,
        "backward": backward,
        "decode": lambda: flash_attn_with_kvcache(
            randn(2, 1, 2, 64), pages, pages, cache_seqlens=used, block_table=table, num_splits=3
        ),
    }


# Allocations of a call: results, and memory between its launches.
MEMORY = {"plain": 2, "largest": 3, "in_parts": 3, "beside": 3, "backward": 2, "decode": 3}


@contextmanager
def noted(kernels: ModuleType) -> Iterator[list]:
    """Launches are not made: (thread, early), in their order, when it ends."""
    log: list = []
    kernels.begin_log()
    try:
        yield log
    finally:
        log += kernels.end_log()


@pytest.fixture
def hopper(kernels, monkeypatch) -> Iterator[ModuleType]:
    with library.serving(monkeypatch, 90):
        yield kernels


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Threads of Python take turns fifty times as often, also where other work slows them down."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("name", launch_model.CALLS)
def test_launches_are_those_of_the_model(hopper, name):
    with noted(hopper) as log:
        calls()[name]()
    assert [early for _, early in log] == [x.early for x in launch_model.CALLS[name](9)]


@pytest.mark.parametrize("name", MEMORY)
def test_all_memory_is_there_before_the_first_launch(hopper, name):
    """Whichever allocation fails, nothing was launched: an early launch does not wait for readers
    of memory that was given back after the launch before it."""
    call, driver = calls()[name], ctypes.CDLL(library._path)
    failed = 0
    while True:
        driver.allow_allocations(failed)
        try:
            with noted(hopper) as log:
                call()
            break
        except torch.OutOfMemoryError:
            assert log == []
            failed += 1
        finally:
            driver.allow_allocations(-1)
    assert failed >= MEMORY[name]


@pytest.mark.parametrize("seed", range(3))
def test_threads_on_one_stream(hopper, quick_turns, seed):
    made = calls()
    alone = {}
    for name, call in made.items():
        with noted(hopper) as log:
            call()
        alone[name] = [early for _, early in log]

    start = threading.Barrier(4)
    orders: dict[int, list[str]] = {}

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(10 * seed + number)
        order = [[*made][n] for n in torch.randint(len(made), (30,), generator=generator)]
        orders[threading.get_ident()] = order
        start.wait()
        for name in order:
            made[name]()

    threads = [threading.Thread(target=work, args=[n]) for n in range(4)]
    with noted(hopper) as log:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len({*orders}) == 4
    assert len([*groupby(log, key=lambda entry: entry[0])]) > 20  # they do take turns
    at = dict.fromkeys(orders, 0)
    while log:
        thread = log[0][0]
        name = orders[thread][at[thread]]
        unit, log = log[: len(alone[name])], log[len(alone[name]) :]
        assert unit == [(thread, early) for early in alone[name]], name
        at[thread] += 1
    assert at == {thread: len(order) for thread, order in orders.items()}
