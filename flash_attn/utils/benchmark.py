"""Timing of a function and of its gradient by ``torch.utils.benchmark``, and what memory it takes.

For figures that are to be compared, with the cache flushed and contenders in turn, see
``python -m benchmarks`` of the repository.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.benchmark as benchmark
from torch import Tensor

__all__ = [
    "benchmark_all",
    "benchmark_backward",
    "benchmark_combined",
    "benchmark_forward",
    "benchmark_fwd_bwd",
    "benchmark_memory",
    "pytorch_profiler",
]


_Measured = tuple[benchmark.Timer, benchmark.Measurement]


def _first(out) -> Tensor:
    return out[0] if isinstance(out, (tuple, list)) else out


def _amp(amp: bool, dtype: torch.dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(device, dtype=dtype, enabled=amp)


def _measure(
    run: Callable[[], object], what: str, desc: str, repeats: int, verbose: bool
) -> _Measured:
    timer = benchmark.Timer(stmt="run()", globals={"run": run}, num_threads=torch.get_num_threads())
    if verbose:
        print(desc, f"- {what}")
    measurement = timer.timeit(repeats)
    if verbose:
        print(measurement)
    return timer, measurement


def _clear(inputs) -> None:
    for x in inputs:
        if isinstance(x, Tensor):
            x.grad = None


def _upstream(out: Tensor, grad: Tensor | None) -> Tensor:
    """The gradient to go back with."""
    if grad is None:
        return torch.randn_like(out)
    if grad.shape != out.shape:
        raise ValueError(f"grad: got shape {tuple(grad.shape)}; {tuple(out.shape)} is needed")
    return grad


def benchmark_forward(
    fn: Callable, *inputs: Any, repeats: int = 10, desc: str = "", verbose: bool = True,
    amp: bool = False, amp_dtype: torch.dtype = torch.float16, **kwinputs: Any,
) -> _Measured:  # fmt: skip
    """``fn(*inputs, **kwinputs)``, under autocast with ``amp``.

    Returns:
        the ``Timer`` and its ``Measurement`` of ``repeats`` runs.
    """

    def run():
        with _amp(amp, amp_dtype):
            fn(*inputs, **kwinputs)

    return _measure(run, "Forward pass", desc, repeats, verbose)


def benchmark_backward(
    fn: Callable, *inputs: Any, grad: Tensor | None = None, repeats: int = 10, desc: str = "",
    verbose: bool = True, amp: bool = False, amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> _Measured:  # fmt: skip
    """The backward alone, of the first result of ``fn``; ``grad`` is random by default."""
    with _amp(amp, amp_dtype):
        out = _first(fn(*inputs, **kwinputs))
    grad = _upstream(out, grad)

    def run():
        _clear(inputs)
        out.backward(grad, retain_graph=True)

    return _measure(run, "Backward pass", desc, repeats, verbose)


def benchmark_combined(
    fn: Callable, *inputs: Any, grad: Tensor | None = None, repeats: int = 10, desc: str = "",
    verbose: bool = True, amp: bool = False, amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> _Measured:  # fmt: skip
    """Forward and backward in one; otherwise as ``benchmark_backward``."""
    with _amp(amp, amp_dtype):
        grad = _upstream(_first(fn(*inputs, **kwinputs)), grad)

    def run():
        _clear(inputs)
        with _amp(amp, amp_dtype):
            out = _first(fn(*inputs, **kwinputs))
        out.backward(grad)

    return _measure(run, "Forward + Backward pass", desc, repeats, verbose)


def benchmark_fwd_bwd(
    fn: Callable, *inputs: Any, grad: Tensor | None = None, **options: Any
) -> tuple[_Measured, _Measured]:
    """``benchmark_forward`` and ``benchmark_backward``."""
    return (
        benchmark_forward(fn, *inputs, **options),
        benchmark_backward(fn, *inputs, grad=grad, **options),
    )


def benchmark_all(
    fn: Callable, *inputs: Any, grad: Tensor | None = None, **options: Any
) -> tuple[_Measured, _Measured, _Measured]:
    """``benchmark_forward``, ``benchmark_backward`` and ``benchmark_combined``."""
    return (
        *benchmark_fwd_bwd(fn, *inputs, grad=grad, **options),
        benchmark_combined(fn, *inputs, grad=grad, **options),
    )


def pytorch_profiler(
    fn: Callable, *inputs: Any, trace_filename: str | None = None, backward: bool = False,
    amp: bool = False, amp_dtype: torch.dtype = torch.float16, cpu: bool = False,
    verbose: bool = True, **kwinputs: Any,
) -> None:  # fmt: skip
    """Profiles one run after some that warm up.

    Args:
        backward: with the gradient of the first result.
        trace_filename: where to write a Chrome trace.
        cpu: also record the host.
        verbose: print the table of what took longest.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    if cpu or not activities:
        activities.append(torch.profiler.ProfilerActivity.CPU)

    def run():
        _clear(inputs)
        with _amp(amp, amp_dtype):
            out = _first(fn(*inputs, **kwinputs))
        if backward:
            out.backward(torch.ones_like(out))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(3):
        run()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        run()
    if verbose:
        print(profile.key_averages().table(row_limit=50))
    if trace_filename is not None:
        profile.export_chrome_trace(trace_filename)


def benchmark_memory(
    fn: Callable, *inputs: Any, desc: str = "", verbose: bool = True, **kwinputs: Any
) -> float:
    """The most GPU memory that torch held during a call, in GiB."""
    if not torch.cuda.is_available():
        raise RuntimeError("benchmark_memory needs a GPU: torch counts no memory of the host")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    fn(*inputs, **kwinputs)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    if verbose:
        print(f"{desc} max memory: {peak} GiB")
    torch.cuda.empty_cache()
    return peak
