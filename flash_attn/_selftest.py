"""The self-test of ``python -m flash_attn``: every kind of call against naive float64 attention.

Small on purpose: it answers whether this installation works on this machine. The test suite
answers whether the library is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

_HEADS, _HEADS_K, _HEAD_DIM = 4, 2, 64
_LENGTHS = (37, 0, 64)  # of the varlen batch


@dataclass(frozen=True)
class Result:
    """One test: its largest error against the bar, or why it did not run or what it raised."""

    name: str
    status: str  # "ok", "failed" or "missing": no kernel for it yet
    detail: str


def run(device: str) -> Iterator[Result]:
    """Runs every test on a device, one result at a time."""
    if device == "cuda":
        yield _run_one("cuda first call", _first_call, device)
    dtypes = (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        for name, test in _TESTS.items():
            label = f"{device} {str(dtype).removeprefix('torch.')} {name}"
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                yield _run_one(label, _judged, test, device, dtype)


def _run_one(label: str, test: Callable[..., tuple[str, str]], *args) -> Result:
    try:
        return Result(label, *test(*args))
    except NotImplementedError as error:
        return Result(label, "missing", str(error))
    except Exception as error:
        return Result(label, "failed", f"{type(error).__name__}: {error}")


def _first_call(device: str) -> tuple[str, str]:
    """Times the call in which CUDA loads the first kernel, or compiles it."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    inputs = _random(device, torch.bfloat16, 70, 101)
    synchronize()
    started = time.perf_counter()
    flash_attn_func(*inputs)
    synchronize()
    return "ok", f"took {time.perf_counter() - started:.3f} s, with loading its kernel"


def _judged(test: Callable, device: str, dtype: torch.dtype) -> tuple[str, str]:
    errors = list(test(device, dtype))
    worst, bar, what = max(errors, key=lambda e: e[0] / e[1] if e[0] == e[0] else float("inf"))
    ok = all(error <= bar for error, bar, _ in errors)  # NaN is not <= anything
    return "ok" if ok else "failed", f"{what}: error {worst:.1e}, allowed {bar:.1e}"


def _reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention with a score matrix; q (b, sq, h, d), k and v (b, sk, hk, d)."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        seqlen_q, seqlen_k = scores.shape[-2:]
        hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(seqlen_k - seqlen_q + 1), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def _random(device: str, dtype: torch.dtype, *lengths: int) -> list[Tensor]:
    """q (1, sq, h, d) and k, v (1, sk, hk, d); drawn on the CPU, the same on every device."""
    seqlen_q, seqlen_k = lengths
    shapes = [(seqlen_q, _HEADS), (seqlen_k, _HEADS_K), (seqlen_k, _HEADS_K)]
    return [torch.randn(1, s, h, _HEAD_DIM).to(dtype).to(device) for s, h in shapes]


def _against_reference(ours: Tensor, reference: Callable, inputs: list[Tensor], what: str):
    """(error, allowed, what): twice what naive attention in the same dtype gets, plus 1e-5."""
    exact = reference(*(x.double() for x in inputs))
    naive = reference(*inputs)
    error = (ours.double() - exact).abs().max().item()
    return error, 2 * (naive.double() - exact).abs().max().item() + 1e-5, what


def _forward(device, dtype):
    inputs = _random(device, dtype, 70, 101)
    for causal in (False, True):
        out = flash_attn_func(*inputs, causal=causal)
        reference = partial(_reference, causal=causal)
        yield _against_reference(out, reference, inputs, f"causal={causal} out")


def _backward(device, dtype):
    inputs = _random(device, dtype, 70, 101)
    dout = torch.randn(inputs[0].shape).to(dtype).to(device)

    def gradients(attention, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        return torch.autograd.grad(attention(*leaves), leaves, dout.to(dtype))

    ours = gradients(lambda *x: flash_attn_func(*x, causal=True), dtype)
    for i, name in enumerate("qkv"):

        def reference(*x, i=i):
            return gradients(partial(_reference, causal=True), x[0].dtype)[i]

        yield _against_reference(ours[i], reference, inputs, f"d{name}")


def _varlen(device, dtype):
    parts = [_random(device, dtype, n, n) for n in _LENGTHS]
    q, k, v = (torch.cat([part[i][0] for part in parts]) for i in range(3))
    ends = torch.tensor((0, *_LENGTHS)).cumsum(0).to(device, torch.int32)
    out = flash_attn_varlen_func(q, k, v, ends, ends, max(_LENGTHS), max(_LENGTHS), causal=True)
    start = 0
    for inputs, length in zip(parts, _LENGTHS):
        if length:
            yield _against_reference(
                out[None, start : start + length],
                partial(_reference, causal=True),
                inputs,
                f"sequence of {length} out",
            )
        start += length


def _kvcache(device, dtype):
    used, new = 50, 3
    q, k, v = _random(device, dtype, new, used + new)
    k_cache, v_cache = (
        torch.zeros(1, 80, *x.shape[2:], dtype=dtype, device=device) for x in (k, v)
    )
    k_cache[:, :used], v_cache[:, :used] = k[:, :used], v[:, :used]
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k[:, used:], v[:, used:], cache_seqlens=used, causal=True
    )
    yield _against_reference(out, partial(_reference, causal=True), [q, k, v], "out")
    appended = (k_cache[:, : used + new] - k).abs().max().item()
    yield appended, 1e-30, "appended keys"  # copied, not computed


_TESTS = {"forward": _forward, "backward": _backward, "varlen": _varlen, "kvcache": _kvcache}
