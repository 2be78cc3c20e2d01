"""What calls of linear attention launch on a GPU, and what graphs of them compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def launched(call: Callable[[], object]) -> list[str]:
    """The kernels of a call, by name."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events()]


def check_graph_of_lengths(scan: Callable, arguments: Sequence, edges: Tensor) -> None:
    """A graph of a call reads offsets [3], one of the arguments, at each replay."""
    scan(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = scan(*arguments)
    for middle in (100, 250):
        edges[1] = middle
        graph.replay()
        for got, want in zip(found, scan(*arguments), strict=True):
            assert torch.equal(got, want)


def check_one_kernel_and_graph(
    step: Callable, kernel: str, given: Sequence[Tensor], state: Tensor, slots: Tensor, *rest
) -> None:
    """A step is one launch, and its graph reads slots and states at each replay."""
    cache = state.clone()
    names = launched(lambda: step(*given, cache, slots, *rest))
    assert sum(kernel in name for name in names) == 1
    assert not any("elementwise" in name or "index" in name for name in names)
    other, graph = state.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(*given, state, slots, *rest)
    for first in (3, -1):
        slots[0] = first
        graph.replay()
        assert torch.equal(o, step(*given, other, slots, *rest))
        assert torch.equal(state, other)
