"""Time and peak memory of attention, forward and backward, against sequence length."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn import flash_attn_func


@dataclass
class Point:
    seqlen: int
    milliseconds: float
    megabytes: float


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V, causal, with its score matrix; (batch, seqlen, heads, d)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    probabilities = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (probabilities @ v).transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


def sweep(
    attention: Callable,
    seqlens: list[int],
    device: torch.device,
    dtype: torch.dtype,
    heads: int = 4,
) -> list[Point]:
    """Forward and backward of one sequence, head dimension 64."""
    points = []
    for seqlen in seqlens:
        shape = (1, seqlen, heads, 64)
        q, k, v = (
            torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)
        )
        dout = torch.randn(shape, device=device, dtype=dtype)

        def step(inputs=(q, k, v), dout=dout) -> None:
            torch.autograd.grad(attention(*inputs), inputs, dout)

        points.append(Point(seqlen, _milliseconds(step, device), peak_megabytes(step, device)))
    return points


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _milliseconds(step: Callable, device: torch.device, budget: float = 0.5) -> float:
    """Median of up to 9 runs within ``budget`` seconds, after one that warms up."""
    samples, end = [], time.perf_counter() + budget
    step()
    while not samples or (len(samples) < 9 and time.perf_counter() < end):
        _synchronize(device)
        start = time.perf_counter()
        step()
        _synchronize(device)
        samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples)


def peak_megabytes(step: Callable, device: torch.device) -> float:
    """Most memory that one run holds on top of its inputs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        _synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    # On the CPU the profiler sees every allocation of torch's, inside operations too.
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak / 1e6
