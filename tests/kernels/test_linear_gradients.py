"""Gradients by linear attention's kernels against those of its recurrence in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flash_attn.linear import chunk_scan
from tests.kernels import library
from tests.kernels.linear_results import check_neighbours, poison_gradients
from tests.linear.cases import GATES, HEAD_DIMS, Backend, Case, by_turns, check, packed

BF16, FP16 = torch.bfloat16, torch.float16
HOST = Backend("cpu", kernels=True)
SEQLENS = (1, 15, 63, 65, 200, 260)


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> Iterator[list[int]]:
    """Tokens of each call of the kernels, whose results begin as NaN."""
    taken = poison_gradients(monkeypatch)
    with library.serving(monkeypatch, 80):
        yield taken


@pytest.mark.parametrize("T", SEQLENS)
@pytest.mark.parametrize("K", HEAD_DIMS)
def test_head_dims_and_lengths(K, T, calls):
    n = len(SEQLENS) * HEAD_DIMS.index(K) + SEQLENS.index(T)
    check(by_turns(n, ("scalar", "none", "scalar", "head")[n % 4], K, T), HOST)
    assert calls == [T]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gate", [None, *GATES])
def test_gates(gate, dtype, calls):
    check(Case("scalar", 16, 24, 140, gate, B=2, dtype=dtype), HOST)
    check(Case("head", 24, 16, 63, gate, cu_seqlens=packed(63), dtype=dtype), HOST)
    assert calls == [140, 63]


def test_nothing_outside_sequences(calls):
    for edges in ((5, 5, 133, 134, 134, 262), (0, 128, 256, 300), (300, 300), (290, 300)):
        check(Case("scalar", 16, 8, 300, H=1, HK=1, cu_seqlens=edges, dtype=BF16), HOST)
    assert calls == [300] * 4


def test_shared_heads(calls):
    """dq and dk are fp32 where heads of v share one of q and k."""
    check(Case("scalar", 20, 36, 140, H=6, HK=2, dtype=BF16), HOST)
    check(Case("scalar", 130, 34, 70, H=2, HK=1, dtype=FP16), HOST)
    assert calls == [140, 70]


def test_gate_gradient_does_not_cancel():
    """q∘dq - k∘dk summed over what follows has terms 10^4 times as large as what crosses token 250,
    behind a gate of e^-9 that nothing but its neighbours pass."""
    T, at = 256, 250
    q, k = (torch.randn(1, T, 1, 16).bfloat16().requires_grad_() for _ in range(2))
    v, do = (torch.randn(1, T, 1, 16).bfloat16() for _ in range(2))
    g = torch.zeros(1, T, 1)
    g[:, at] = -9.0
    g.requires_grad_()
    o, _ = chunk_scan(q, k, v, g)
    (dg,) = torch.autograd.grad(o, g, do)
    q, k, v, do = (x.detach().double()[0, :, 0] for x in (q, k, v, do))
    pairs = (q @ k.T) * (do @ v.T) * 16**-0.5 * torch.e**-9.0
    crossing = pairs[at:, :at]
    assert (dg[0, at, 0] - crossing.sum()).abs() < 2.0**-7 * crossing.norm() * 4
    everything = (q @ k.T) * (do @ v.T)
    assert everything.tril().norm() > 1e3 * crossing.norm()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gate_gradient_of_one_chunk(dtype):
    """Sums of pairs, which are not rounded to 16 bits, behind gates of e^-12."""
    T, late = 100, 51
    q, k, v, do = (torch.randn(T, 16).to(dtype) for _ in range(4))
    g = -0.01 * torch.rand(T)
    g[late - 1 :] = -12.0
    inputs = [x[None, :, None] for x in (q, k, v)]
    given = g[None, :, None].requires_grad_()
    o, _ = chunk_scan(*inputs, given)
    (dg,) = torch.autograd.grad(o, given, do[None, :, None])
    q, k, v, do, g = (x.detach().double() for x in (q, k, v, do, g))
    G = g.cumsum(0)
    pairs = (q @ k.T * 16**-0.5 * (G[:, None] - G).exp() * (do @ v.T)).tril(-1)
    want = torch.stack([pairs[t:, :t].sum() for t in range(T)])
    assert want[late:].abs().max() < 1e-2 * want.abs().max()
    for part in (slice(late), slice(late, T)):
        assert (dg[0, part, 0] - want[part]).abs().max() < 1e-4 * want[part].abs().max()


def test_neighbours_change_no_bit(calls):
    q, k, v = (torch.randn(1, 300, 1, d).half() for d in (24, 24, 40))
    check_neighbours(q, k, v, -torch.rand(1, 300, 1), torch.randn_like(v))
    assert calls == [300, 200]


def test_strides():
    made = torch.randn(2, 2, 70, 3 * 24).bfloat16()
    do = torch.randn(2, 70, 2, 24).bfloat16()
    given = [x.transpose(1, 2).requires_grad_() for x in made.split(24, -1)]
    dense = [x.detach().contiguous().requires_grad_() for x in given]
    found = (torch.autograd.grad(chunk_scan(*xs)[0], xs, do) for xs in (given, dense))
    for got, same in zip(*found, strict=True):
        assert torch.equal(got, same)
