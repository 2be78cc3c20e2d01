"""Gradients by the kernels for a vector of decays against those of the recurrence in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flash_attn.linear import chunk_scan
from tests.kernels import library
from tests.kernels.linear_results import check_neighbours, poison_gradients
from tests.linear.cases import GATES, Backend, Case, by_turns, check, packed

BF16, FP16 = torch.bfloat16, torch.float16
HOST = Backend("cpu", kernels=True)
SEQLENS = (1, 15, 33, 65, 200)


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[int]:
    """Tokens of each call of the kernels, whose results begin as NaN."""
    return poison_gradients(monkeypatch)


@pytest.fixture(autouse=True)
def gpu(monkeypatch) -> Iterator[None]:
    with library.serving(monkeypatch, 80):
        yield


@pytest.mark.parametrize("T", SEQLENS)
@pytest.mark.parametrize("K", [1, 7, 16, 20, 32, 60, 100, 128, 200])
def test_head_dims_and_lengths(K, T, calls):
    check(by_turns(len(SEQLENS) * K + SEQLENS.index(T), "vector", K, T), HOST)
    assert calls == [T]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gate", [None, *GATES, -3.0])
def test_gates(gate, dtype, calls):
    """Behind -69 in 16 tokens pairs are made of an exponential each."""
    check(Case("vector", 16, 24, 140, gate, B=2, dtype=dtype), HOST)
    check(Case("vector", 40, 16, 63, gate, cu_seqlens=packed(63), dtype=dtype), HOST)
    assert calls == [140, 63]


@pytest.mark.parametrize(("K", "V", "segment"), [(7, 40, 1024), (60, 130, 1024), (130, 9, 2048)])
def test_segments(K, V, segment):
    """Sequences that are longer than a segment of WalkTiling, dense or packed."""
    T = segment * (2 if V < 100 and K < 100 else 1) + 70
    edges = None if V == 40 else (3, 3, segment + 3, segment + 4, T - 4, T - 4)
    dtype = BF16 if V == 40 else FP16
    check(Case("vector", K, V, T, H=1, HK=1, dtype=dtype, cu_seqlens=edges, v_first=True), HOST)


@pytest.mark.parametrize(("K", "V"), [(33, 129), (70, 260), (129, 256)])
def test_tiles_of_a_state(K, V):
    """Tiles of 64 x 256, one or several along K, V or both, with parts where V has several."""
    check(Case("vector", K, V, 40, H=1, HK=1, dtype=BF16), HOST)


def test_states_that_reach_the_other_end():
    """Gates so small that what the scans multiply by is not 0."""
    check(Case("vector", 24, 24, 2200, -1e-4, H=1, HK=1, dtype=BF16), HOST)


def test_nothing_outside_sequences(calls):
    for V in (8, 150):  # one tile of V, and parts of two
        for edges in ((5, 5, 133, 134, 134, 262), (0, 128, 256, 300), (300, 300), (290, 300)):
            check(Case("vector", 16, V, 300, H=1, HK=1, cu_seqlens=edges, dtype=BF16), HOST)
    assert calls == [300] * 8


def test_shared_heads(calls):
    """dq and dk are fp32 where heads of v share one of q and k."""
    check(Case("vector", 20, 36, 70, H=6, HK=2, dtype=BF16), HOST)
    check(Case("vector", 130, 134, 40, H=2, HK=1, dtype=FP16), HOST)
    assert calls == [70, 40]


def test_a_scale_as_small_as_fp16_numbers():
    """A power of two in the scale changes no digit of the state's gradient."""
    q, k, v, do = (torch.randn(1, 40, 1, 16).half() for _ in range(4))
    g = -torch.rand(1, 40, 1, 16)
    found = []
    for scale in (1.0, 2.0**-20, 2.0**20):
        state = torch.zeros(1, 1, 16, 16).requires_grad_()
        o, _ = chunk_scan(q, k, v, g, scale=scale, initial_state=state)
        (gradient,) = torch.autograd.grad(o, state, do)
        found.append(gradient / scale)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert found[0].abs().min() > 0


def inputs_with_one_gate(at: int, gate: float, T: int) -> tuple[torch.Tensor, ...]:
    q, k = (torch.randn(1, T, 1, 16).bfloat16().requires_grad_() for _ in range(2))
    v, do = (torch.randn(1, T, 1, 16).bfloat16() for _ in range(2))
    g = torch.zeros(1, T, 1, 16)
    g[:, at] = gate
    return q, k, v, do, g.requires_grad_()


@pytest.mark.parametrize("at", [250, 32, 40, 7])
def test_gate_gradient_does_not_cancel(at):
    """q∘dq - k∘dk summed over what follows has terms 10^3 times as large as what crosses a token,
    behind a gate of e^-9 that nothing but its neighbours pass."""
    T = 256
    q, k, v, do, g = inputs_with_one_gate(at, -9.0, T)
    o, _ = chunk_scan(q, k, v, g)
    (dg,) = torch.autograd.grad(o, g, do)
    q, k, v, do = (x.detach().double()[0, :, 0] for x in (q, k, v, do))
    pairs = torch.einsum("id,jd,ij->ijd", q, k, do @ v.T) * 16**-0.5 * torch.e**-9.0
    crossing = pairs[at:, :at]
    error = (dg[0, at, 0] - crossing.sum((0, 1))).abs()
    assert (error < 2.0**-7 * crossing.flatten(0, 1).norm(dim=0) * 4).all()
    others = (torch.einsum("id,jd,ij->ijd", q, k, do @ v.T) * 16**-0.5)[at:, at:]
    assert others.norm() > 1e2 * crossing.norm()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gate_gradient_of_a_step(dtype):
    """Sums of pairs, which are not rounded to 16 bits, behind gates of e^-4."""
    T, late = 16, 9
    q, k, v, do = (torch.randn(T, 16).to(dtype) for _ in range(4))
    g = -0.01 * torch.rand(T, 16)
    g[late - 1 :] = -4.0
    inputs = [x[None, :, None] for x in (q, k, v)]
    given = g[None, :, None].requires_grad_()
    o, _ = chunk_scan(*inputs, given)
    (dg,) = torch.autograd.grad(o, given, do[None, :, None])
    q, k, v, do, g = (x.detach().double() for x in (q, k, v, do, g))
    G = g.cumsum(0)
    decays = (G[:, None] - G).exp()
    pairs = torch.einsum("id,jd,ijd,ij->ijd", q, k, decays, (do @ v.T).tril(-1)) * 16**-0.5
    want = torch.stack([pairs[t:, :t].sum((0, 1)) for t in range(T)])
    assert want[late:].abs().max() < 0.1 * want.abs().max()
    for part in (slice(late), slice(late, T)):
        assert (dg[0, part, 0] - want[part]).abs().max() < 1e-5 * want[part].abs().max()


@pytest.mark.parametrize("V", [16, 136])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gate_gradient_of_pairs_that_meet_in_a_state(dtype, V):
    """Tokens 15 and 16 are of two steps: what crosses both gates meets in the state between them,
    which has 16 digits of two numbers, as what enters it. Gates of -12 leave nothing else."""
    T, K = 32, 16
    q, k = (8 * torch.randn(T, K).to(dtype) for _ in range(2))
    v, do = (torch.randn(T, V).to(dtype) for _ in range(2))
    for strong in (slice(16, 17), slice(15, 16), slice(16, 32), slice(0, 16)):
        gates = -0.3 * torch.rand(T, K)
        gates[strong] = -12.0
        given = gates[None, :, None].requires_grad_()
        o, _ = chunk_scan(*(x[None, :, None] for x in (q, k, v)), given, scale=0.25)
        (dg,) = torch.autograd.grad(o, given, do[None, :, None])
        exact = gates.detach().double().requires_grad_()
        G = exact.cumsum(0)
        decays = (G[:, None] - G).masked_fill(torch.ones(T, T).triu(1).bool()[..., None], 0).exp()
        weights = torch.einsum("id,jd,ijd->ij", q.double(), k.double(), decays).tril() * 0.25
        ((weights @ v.double()) * do.double()).sum().backward()
        want = exact.grad[15:17]
        assert (dg[0, 15:17, 0] - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("V", [40, 140])
def test_neighbours_change_no_bit(V, calls):
    q, k = (torch.randn(1, 300, 1, 24).half() for _ in range(2))
    v, do = (torch.randn(1, 300, 1, V).half() for _ in range(2))
    g = -3 * torch.rand(1, 300, 1, 24)
    check_neighbours(q, k, v, g, do)
    assert calls == [300, 200]


def test_other_heads_change_no_bit():
    """Heads of a CTA, one with strong gates."""
    q, k, v = (torch.randn(1, 50, 5, 16).bfloat16().requires_grad_() for _ in range(3))
    g = -torch.rand(1, 50, 5, 16)
    g[:, :, 1] *= 30
    g.requires_grad_()
    do = torch.randn(1, 50, 5, 16).bfloat16()
    found = torch.autograd.grad(chunk_scan(q, k, v, g)[0], (q, k, v, g), do)
    for head in range(5):
        own = [x[:, :, head : head + 1].detach().requires_grad_() for x in (q, k, v, g)]
        o, _ = chunk_scan(*own)
        alone = torch.autograd.grad(o, own, do[:, :, head : head + 1])
        for of_all, x in zip(found, alone, strict=True):
            assert torch.equal(of_all[:, :, head : head + 1], x)


@pytest.mark.parametrize("K", [20, 24])
def test_gates_of_q_dtype_and_strides(K):
    made = torch.randn(2, 2, 70, 3 * K).bfloat16()
    do, g = torch.randn(2, 70, 2, K).bfloat16(), -3 * torch.rand(2, 70, 2, K).bfloat16()
    given = [x.transpose(1, 2).requires_grad_() for x in made.split(K, -1)]
    dense = [x.detach().contiguous().requires_grad_() for x in given]
    gates = (g.requires_grad_(), g.detach().float().requires_grad_())
    found = [
        torch.autograd.grad(chunk_scan(*xs, of_g)[0], [*xs, of_g], do)
        for xs, of_g in zip((given, dense), gates, strict=True)
    ]
    for got, same in zip(*found, strict=True):
        assert torch.equal(got, same.to(got.dtype))


def test_gates_that_need_no_gradient():
    q, k, v = (torch.randn(1, 70, 2, 24).half().requires_grad_() for _ in range(3))
    g = -torch.rand(1, 70, 2, 24)
    do = torch.randn(1, 70, 2, 24).half()
    without = torch.autograd.grad(chunk_scan(q, k, v, g)[0], (q, k, v), do)
    with_dg = torch.autograd.grad(chunk_scan(q, k, v, g.requires_grad_())[0], (q, k, v, g), do)
    for x, y in zip(without, with_dg[:3], strict=True):
        assert torch.equal(x, y)
    assert with_dg[3].isfinite().all()


@pytest.mark.parametrize("K", [257, 520])
def test_vectors_in_tiles_of_k(calls, K):
    check(Case("vector", K, 8, 20, H=1, HK=1, dtype=BF16, v_first=True), HOST)
    assert len(calls) == -(-K // 256)
