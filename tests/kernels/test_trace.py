"""What launches say of themselves: to whoever listens, from whichever thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import flash_attn
from tests.kernels import library


@pytest.fixture
def listen(kernels, monkeypatch) -> Iterator[Callable]:
    with library.serving(monkeypatch, 90):
        yield library.module().trace_to
        library.module().trace_to(None)


def attend(grad: bool = False, seqlen: int = 5) -> torch.Tensor:
    q = torch.randn(1, seqlen, 2, 64, dtype=torch.bfloat16, requires_grad=grad)
    out = flash_attn.flash_attn_func(q, q, q)
    if grad:
        out.sum().backward()
    return out


def test_each_launch_has_a_line_while_somebody_listens(listen):
    lines: list[str] = []
    attend()
    listen(lines.append)
    attend()
    assert len(lines) == 1
    assert lines[0].startswith("b 1, 5 x 5, h 2/2, d 64, window -1/-1 -> ")
    attend(grad=True)
    assert len(lines) == 3
    assert "-> bwd" in lines[2]
    listen(None)
    attend()
    assert len(lines) == 3


def test_threads_that_do_not_hold_the_interpreter_are_heard(listen):
    lines: list[str] = []
    listen(lines.append)
    threads = [threading.Thread(target=attend, args=(True, n)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines) == 16


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_call_does_not_fail_because_its_listener_does(listen):
    def listener(line: str) -> None:
        raise RuntimeError(line)

    expected = attend(seqlen=1).shape
    listen(listener)
    assert attend(seqlen=1).shape == expected
