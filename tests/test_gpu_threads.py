"""Threads that call at the same time, on one stream and on two: each gets what it gets alone.

`THREADED_CALLS=50000 pytest tests/test_gpu_threads.py` makes as many calls in each test.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from compare import assert_bitwise
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_backward

CALLS = int(os.environ.get("THREADED_CALLS", "2000"))  # of each test, by all threads together
BF16 = torch.bfloat16


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=BF16, device="cuda")


def ints(values) -> Tensor:
    return torch.tensor([*values], dtype=torch.int32, device="cuda")


@dataclass
class Alone:
    """A call, and its results when no other thread calls. close: one of them whose sums have no
    order, by its number."""

    call: Callable[[], tuple[Tensor, ...]]
    close: int | None = None

    def __post_init__(self):
        self.results = self.call()

    def differs(self) -> Tensor:
        """Whether the call's results are others now; on the GPU."""
        wrong = torch.zeros((), dtype=torch.bool, device="cuda")
        for number, (now, then) in enumerate(zip(self.call(), self.results, strict=True)):
            if number != self.close:
                wrong |= (now != then).any()
                continue
            order = 1e-6 * then.abs().max() + 2**-7 * then.abs()  # float32 sums, rounded to bf16
            wrong |= ((now - then).abs() > order).any()
        return wrong


# ---- calls --------------------------------------------------------------------------------------


def forward(b: int, s: int, h: int, d: int, **options) -> Alone:
    q, k, v = randn(3, b, s, h, d)
    return Alone(lambda: flash_attn_func(q, k, v, return_lse=True, **options))


def forwards() -> list[Alone]:
    """Of equal tiles, whose last wave is not full, and of unequal ones."""
    return [
        forward(2, 4608, 24, 128), forward(2, 4352, 24, 128), forward(2, 4864, 24, 128),
        forward(1, 8192, 16, 64), forward(1, 6144, 16, 64), forward(2, 2304, 12, 256),
        forward(2, 2304, 24, 128, causal=True), forward(4, 2048, 16, 64, causal=True),
        forward(2, 1152, 12, 256, causal=True),
    ]  # fmt: skip


def backward(b: int, s: int, h: int, hk: int, d: int, deterministic: bool, causal: bool) -> Alone:
    q, dout = randn(2, b, s, h, d)
    k, v = randn(2, b, s, hk, d)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)

    def call() -> tuple[Tensor, ...]:
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        softmax_d = _flash_attn_backward(
            dout, q, k, v, out, lse, *gradients, 0.0, d**-0.5, causal, -1, -1, 0.0, None,
            deterministic,
        )  # fmt: skip
        return *gradients, softmax_d

    return Alone(call, close=None if deterministic else 0)


def backwards() -> list[Alone]:
    return [
        backward(b, s, h, hk, d, deterministic, causal)
        for b, s, h, hk, d in ((2, 1100, 16, 16, 128), (4, 700, 16, 4, 64), (1, 900, 8, 8, 256))
        for deterministic in (False, True)
        for causal in (False, True)
    ]


def step(lengths: list[int], heads: int, d: int, new: int = 0, **options) -> Alone:
    """Of a cache; new: rows that it appends, the same ones each time."""
    b, size = len(lengths), max(lengths) + new
    k_cache, v_cache = randn(2, b, size, 2, d)
    q, used = randn(b, max(new, 1), heads, d), ints(lengths)
    brings = dict(zip("kv", randn(2, b, new, 2, d), strict=True)) if new else {}

    def call() -> tuple[Tensor, ...]:
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=used, causal=True, return_softmax_lse=True,
            **brings, **options,
        )  # fmt: skip

    return Alone(call)


def caches() -> list[Alone]:
    """Keys that are cut into pieces, by decode and by Hopper's forward."""
    lengths = [4000, 100, 2500, 37]
    return [
        step(lengths, 8, 128), step(lengths, 16, 64, num_splits=7), step([30000], 8, 128),
        step(lengths, 8, 128, new=1), step(lengths, 8, 64, new=3), step([9000], 8, 128, new=100),
        step([5000] * 64, 8, 128, num_splits=40),
    ]  # fmt: skip


def packed(queries: list[int], keys: list[int], d: int, page: int) -> Alone:
    count = [-(-n // page) for n in keys]
    pages = randn(2, sum(count), page, 2, d)
    q, table = randn(sum(queries), 8, d), torch.zeros(len(keys), max(count), dtype=torch.int32)
    for sequence, end in enumerate(accumulate(count)):
        table[sequence, : count[sequence]] = torch.arange(end - count[sequence], end)
    table = table.cuda()
    starts = [ints(accumulate(lengths, initial=0)) for lengths in (queries, keys)]
    longest = max(queries), max(keys)

    def call() -> tuple[Tensor, ...]:
        return flash_attn_varlen_func(
            q, *pages, *starts, *longest, causal=True, block_table=table, return_lse=True
        )

    return Alone(call)


def batches() -> list[Alone]:
    """Single tokens are decoded beside chunks of prompts."""
    tokens, chunks = [1] * 20, [700, 2, 300]
    keys = [1000 + 70 * n for n in range(len(tokens + chunks))]
    return [
        packed(tokens + chunks, keys, 128, 16), packed(chunks + tokens, keys, 64, 64),
        packed(tokens, keys[:20], 128, 16), packed([200], [20000], 128, 64),
    ]  # fmt: skip


def mixed() -> list[Alone]:
    return [*forwards()[::3], *backwards()[::3], *caches(), *batches()]


# ---- threads ------------------------------------------------------------------------------------


def run(cases: list[list[Alone]], streams: list[torch.cuda.Stream | None]) -> int:
    """The number of calls that went wrong; a thread for each list of cases."""
    torch.cuda.synchronize()
    start = threading.Barrier(len(cases))
    wrong: list[Tensor] = []
    errors: list[BaseException] = []

    def work(mine: list[Alone], stream: torch.cuda.Stream | None) -> None:
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():
                count = torch.zeros((), dtype=torch.int64, device="cuda")
                start.wait()
                for n in range(CALLS // len(cases)):
                    count += mine[n % len(mine)].differs()
            wrong.append(count)
        except BaseException as error:  # for the test
            start.abort()
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=item) for item in zip(cases, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    torch.cuda.synchronize()
    return sum(int(count) for count in wrong)


@pytest.mark.parametrize("kind", [forwards, backwards, caches, batches, mixed])
@pytest.mark.parametrize("streams", ["default", "one", "two"])
def test_threads(cuda, kind, streams):
    """Two threads on the default stream, or on another one; two on each of two streams."""
    used = {
        "default": [None, None],
        "one": 2 * [torch.cuda.Stream()],
        "two": 2 * [torch.cuda.Stream(), torch.cuda.Stream()],
    }[streams]
    cases = [kind() for _ in used]
    for n, mine in enumerate(cases):  # so that they are not at the same one
        mine[:] = mine[n:] + mine[:n]
    assert run(cases, used) == 0


# ---- graphs -------------------------------------------------------------------------------------


def node_types(graph: torch.cuda.CUDAGraph) -> list[int]:
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    types = []
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        types.append(kind.value)
    return types


def test_captures_that_use_up_the_kernels_own_counters(cuda):
    """2 KiB each, of 256: none has a node that clears any, and all are right side by side."""
    kernel = 0  # CU_GRAPH_NODE_TYPE_KERNEL
    case = step([1900, 700, 1200, 300, 40, 1500, 900, 1000], 8, 64, num_splits=30)
    graphs, outs = [], []
    for _ in range(200):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            outs.append(case.call())
        assert set(node_types(graph)) == {kernel}
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(3):
        torch.cuda.synchronize()
        for n, graph in enumerate(graphs):
            with torch.cuda.stream(streams[n % len(streams)]):
                graph.replay()
    torch.cuda.synchronize()
    for results in outs:
        for now, then in zip(results, case.results, strict=True):
            assert_bitwise("result", now, then)


def test_captures_of_very_many_pieces_keep_no_counters(cuda):
    """They are in the memory of the graph, behind a node that clears them."""
    kernel, memset = 0, 2  # CU_GRAPH_NODE_TYPE_KERNEL, _MEMSET
    case = step([300, 40] * 3000, 8, 64, num_splits=2)
    graphs, outs = [], []
    for _ in range(4):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            outs.append(case.call())
        assert sorted(node_types(graph)) == [kernel, memset]
        graphs.append(graph)
    for _ in range(3):
        torch.cuda.synchronize()
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
    torch.cuda.synchronize()
    for results in outs:
        for now, then in zip(results, case.results, strict=True):
            assert_bitwise("result", now, then)


FIRST = """
import torch
from flash_attn import flash_attn_func, flash_attn_with_kvcache
q, cache = torch.randn(2, 2000, 24, 128, dtype=torch.bfloat16, device="cuda"), None
cache = torch.randn(2, 3000, 2, 128, dtype=torch.bfloat16, device="cuda")
used = torch.tensor([3000, 200], dtype=torch.int32, device="cuda")
def calls():
    step = flash_attn_with_kvcache(q[:, :1], cache, cache, cache_seqlens=used, num_splits=6)
    return flash_attn_func(q, q, q), step
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = calls()
for _ in range(2):
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, calls()))
"""


def test_the_first_calls_of_a_process_are_captured(cuda):
    """Their counters are found while the graph is captured."""
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", FIRST], cwd=root, check=True, timeout=300)
