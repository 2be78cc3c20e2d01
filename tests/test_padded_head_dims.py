"""Head dims that are no multiple of 8: padded into copies on CUDA, used as they are on the CPU.

The CPU backend takes any head dim, so padding for it must change nothing: that is how the
padding is tested without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from flash_attn.dispatch import calls

HEAD_DIM, HEAD_DIM_V = 60, 44


class Recorder(TorchDispatchMode):
    """Remembers the arguments of our operations."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "flash_attn":
            self.calls.append(args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("head_dim", [60, 64])
def test_head_dims_are_padded_on_cuda_only(head_dim):
    """Fake CUDA tensors: no GPU is needed to see what the operation would be called with."""
    for kind, expected in (("cuda", 64), ("cpu", head_dim)):
        with FakeTensorMode():
            q, k, v = (torch.empty(1, 4, 2, head_dim, device=kind, dtype=torch.half) for _ in "qkv")
            with Recorder() as recorder:
                out = flash_attn.flash_attn_func(q, k, v)
        (arguments,) = recorder.calls
        assert [x.shape[-1] for x in arguments[:3]] == [expected] * 3
        assert arguments[4] == pytest.approx(head_dim**-0.5)
        assert out.shape == q.shape


def qkv(*shape: int, grad: bool = False) -> list[Tensor]:
    """q (*shape, 4, 60), k (*shape, 2, 60), v (*shape, 2, 44)."""
    sizes = ((4, HEAD_DIM), (2, HEAD_DIM), (2, HEAD_DIM_V))
    return [torch.randn(*shape, *size, dtype=torch.float64, requires_grad=grad) for size in sizes]


def both(monkeypatch, call) -> tuple:
    """What ``call`` returns without and with padding, and the head dims the operation saw."""
    results = []
    for padded in (False, True):
        monkeypatch.setattr(calls, "_has_to_pad", lambda q, v, padded=padded: padded)
        with Recorder() as recorder:
            results.append(call())
        seen = tuple(x.shape[-1] for x in recorder.calls[0][:3])
        assert seen == ((64, 64, 48) if padded else (HEAD_DIM, HEAD_DIM, HEAD_DIM_V))
    return results


def test_dense(monkeypatch):
    inputs = qkv(2, 9, grad=True)
    dout = torch.randn(2, 9, 4, HEAD_DIM_V, dtype=torch.float64)

    def call():
        out, lse = flash_attn.flash_attn_func(*inputs, causal=True, return_lse=True)
        return out, lse, *torch.autograd.grad((out, lse), inputs, (dout, torch.ones_like(lse)))

    for ours, expected in zip(*both(monkeypatch, call)):
        torch.testing.assert_close(ours, expected)


def test_varlen(monkeypatch):
    inputs = qkv(9, grad=True)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)

    def call():
        out = flash_attn.flash_attn_varlen_func(*inputs, ends, ends, 5, 5, window_size=(2, 0))
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    for ours, expected in zip(*both(monkeypatch, call)):
        torch.testing.assert_close(ours, expected)


def test_a_cache_stays_where_it_is():
    """Only what comes with the call is padded, and what it returns cut."""
    with FakeTensorMode():
        q, new = (torch.empty(2, 1, h, HEAD_DIM, device="cuda", dtype=torch.half) for h in (4, 2))
        caches = [torch.empty(2, 16, 2, HEAD_DIM, device="cuda", dtype=torch.half) for _ in "kv"]
        tokens = torch.empty(2, 4, HEAD_DIM, device="cuda", dtype=torch.half)
        ends, lengths = (torch.empty(n, device="cuda", dtype=torch.int32) for n in (3, 2))
        table = torch.empty(2, 1, device="cuda", dtype=torch.int32)
        with Recorder() as recorder:
            out = flash_attn.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=lengths)
        with Recorder() as packed:
            flash_attn.flash_attn_varlen_func(tokens, *caches, ends, ends, 1, 9, block_table=table)
    (arguments,) = recorder.calls
    assert [x.shape[-1] for x in arguments[:5]] == [64, HEAD_DIM, HEAD_DIM, 64, 64]
    assert arguments[1] is caches[0]
    assert out.shape == q.shape
    (arguments,) = packed.calls
    assert [x.shape[-1] for x in arguments[:3]] == [64, HEAD_DIM, HEAD_DIM]
