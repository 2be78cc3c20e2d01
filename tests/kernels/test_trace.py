"""What launches say of themselves: to any listener, from any thread."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import flash_attn
from tests.kernels import library

FIRST = ": first launch took "


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
    listen(lambda line: lines.append(line) if FIRST not in line else None)
    attend()
    assert len(lines) == 1
    assert lines[0].startswith("b 1, 5 x 5, h 2/2, d 64, window -1/-1, whole, ")
    assert " -> decode" in lines[0]
    attend(grad=True)
    assert len(lines) == 3
    assert "-> bwd" in lines[2]
    listen(None)
    attend()
    assert len(lines) == 3


def test_a_line_has_the_plan(listen):
    """As flash_attn.explain words it: of a forward, and of a call against a cache."""
    lines: list[str] = []
    q, cache = (torch.randn(1, n, 2, 64, dtype=torch.bfloat16) for n in (1, 4096))
    listen(lambda line: lines.append(line) if FIRST not in line else None)
    attend(seqlen=300)
    flash_attn.flash_attn_with_kvcache(q, cache, cache, num_splits=1)
    flash_attn.flash_attn_with_kvcache(q, cache, cache, num_splits=3)
    listen(None)
    forward, whole, cut = (line.partition(" -> ")[0] for line in lines)
    assert re.search(r", \d+ rows x \d+ keys, (.*, )?\d+ heads side by side, \d+ us", forward)
    assert re.search(r", whole, \d+ us predicted$", whole)
    assert re.search(r", up to 3 pieces a tile, \d+ us predicted$", cut)


@pytest.mark.parametrize(
    ("head_dim", "sm", "force", "how"),
    [
        (96, 80, "", "machine code was loaded"),
        (192, 120, "", "the driver compiled PTX for sm_120"),
        (256, 80, "1", "the driver compiled PTX for sm_80"),
    ],
)
def test_a_row_s_first_launch_is_timed_once(kernels, monkeypatch, head_dim, sm, force, how):
    """fp16's rows of these head dims no other test listens to."""
    monkeypatch.setenv("CUDA_FORCE_PTX_JIT", force)
    lines: list[str] = []
    with library.serving(monkeypatch, sm):
        library.module().trace_to(lines.append)
        for _ in range(2):
            q = torch.randn(1, 200, 2, head_dim, dtype=torch.float16)  # not decoded
            flash_attn.flash_attn_func(q, q, q)
        library.module().trace_to(None)
    (line,) = (line for line in lines if FIRST in line)
    assert line.startswith(f"fwd_sm80_fp16_d{head_dim}_plain{FIRST}")
    assert line.endswith(f" ms: {how}")


@pytest.mark.parametrize(
    ("sm", "code"),
    [
        (75, "none"),
        (80, "machine code"),
        (86, "machine code"),  # sm_80's: a later minor version
        (87, "PTX"),  # but not on a Jetson
        (89, "machine code"),
        (90, "machine code"),
        (100, "PTX"),
        (110, "PTX"),
        (121, "PTX"),
    ],
)
def test_what_a_gpu_runs(kernels, sm, code):
    """Of a library for "80;90a"."""
    assert library.module().device_code(sm) == code


def test_threads_that_do_not_hold_the_interpreter_are_heard(listen):
    lines: list[str] = []
    listen(lambda line: lines.append(line) if FIRST not in line else None)
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
