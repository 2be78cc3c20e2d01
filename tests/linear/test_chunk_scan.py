"""The core against the recurrence: every head dim and length, gates to -inf, states, packing."""

from __future__ import annotations

import pytest
import torch

from flash_attn.linear import chunk_scan
from tests.linear.cases import DECAYS, GATES, HEAD_DIMS, SEQLENS, Case, brute_force, check, packed
from tests.linear.reference import recurrence

HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("K", HEAD_DIMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_brute_force(decay, K, backend):
    for case in brute_force(decay, K, backend.dtype):
        check(case, backend)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("T", SEQLENS)
@pytest.mark.parametrize("decay", DECAYS)
def test_half_precision(decay, T, dtype, backend):
    for gate in GATES:
        check(Case(decay, 16, 24, T, gate, B=2, dtype=dtype), backend)


@pytest.mark.parametrize("decay", DECAYS)
def test_shared_heads(decay, backend):
    check(Case(decay, B=2, H=6, HK=2), backend)
    check(Case(decay, B=1, H=6, HK=3, cu_seqlens=packed(65)), backend)


@pytest.mark.parametrize("decay", DECAYS)
def test_many_segments(decay, backend, monkeypatch):
    """What is computed at a time changes no result."""
    monkeypatch.setattr("flash_attn.linear._chunks.Scan.chunks_at_a_time", lambda *_: 1)
    check(Case(decay, T=200, B=2), backend)
    check(Case(decay, T=200, cu_seqlens=packed(200)), backend)


def with_gradients(given: dict, wanted: list[str], **options) -> list[torch.Tensor]:
    """o, the final state, and the gradients of the wanted inputs."""
    tracked = given | {name: given[name].detach().requires_grad_() for name in wanted}
    o, final = chunk_scan(**tracked, output_final_state=True, **options)
    loss = o.square().sum() + final.square().sum()
    return [o, final, *torch.autograd.grad(loss, [tracked[name] for name in wanted])]


@pytest.mark.parametrize("decay", DECAYS)
def test_neighbours_change_no_bit(decay, backend):
    """Results and gradients of a sequence are the same alone, in a batch, and in any pack."""
    same = torch.equal if backend.has_own_bits else torch.allclose
    case = Case(decay, 24, 40, 130, B=3, H=3, HK=3)
    given = case.given(backend.device)
    by_token = ["q", "k", "v", *(["g"] if decay in ("scalar", "vector") else [])]
    own = {n: x[1:2] if n in by_token or n == "initial_state" else x for n, x in given.items()}
    alone = with_gradients(own, by_token)
    in_batch = with_gradients(given, by_token)
    for x, y in zip(alone, in_batch):
        assert same(x, y[1:2])
    cut = dict(given)
    for name in by_token:
        x = given[name]
        cut[name] = torch.cat((x[:1, :37], x[1:2], x[2:, :1]), 1)
    edges = torch.tensor([0, 37, 167, 168], dtype=torch.int32, device=backend.device)
    o, final, *gradients = with_gradients(cut, by_token, cu_seqlens=edges)
    for x, y in zip(alone, (o[:, 37:167], final[1:2], *(y[:, 37:167] for y in gradients))):
        assert same(x, y)


def test_rows_of_no_sequence(backend):
    """NaN past the last sequence does no harm; outputs and gradients there are zeros."""
    case = Case("scalar", T=40)
    given = case.given(backend.device)
    for name in ("q", "k", "v", "g"):
        given[name][:, 30:] = torch.nan
    given = {name: x.requires_grad_() for name, x in given.items()}
    edges = torch.tensor([0, 30], device=backend.device)
    o, final = chunk_scan(**given, cu_seqlens=edges, output_final_state=True)
    assert torch.isfinite(o).all()
    assert torch.isfinite(final).all()
    assert not o[:, 30:].any()
    gradients = torch.autograd.grad(o.sum() + final.sum(), [given[n] for n in ("q", "k", "v", "g")])
    for x in gradients:
        assert torch.isfinite(x).all()
        assert not x[:, 30:].any()


def test_gate_gradient_does_not_cancel(backend):
    """dg is q∘dq - k∘dk summed over what follows: terms of either sign that are far larger than the
    result. After a strong gate the true gradient is tiny, and its digits are right nevertheless:
    terms that cancel would leave none there. Kernels round to bf16 what weighs a pair of tokens,
    and add what that left: their terms are right to 2^-17, as sums of fp32 are."""
    torch.manual_seed(1)
    for decay in ("scalar", "vector"):
        case = Case(decay, 16, 16, 64, with_state=False, dtype=torch.bfloat16)
        inputs = case.inputs()
        inputs["k"], inputs["q"] = inputs["k"] * 8, inputs["q"] * 8
        inputs["g"] = inputs["g"] * 0.01
        inputs["g"][:, 32:] = -12.0  # e^-12 of what was before
        names = ("q", "k", "v", "g")
        exact = [inputs[name].requires_grad_() for name in names]
        do = torch.randn(1, 64, 2, 16).to(torch.bfloat16).double()
        o, _ = recurrence(*exact, 0.25)
        (want,) = torch.autograd.grad((o * do).sum(), exact[-1:])
        given = [
            x.detach().to(backend.device, torch.float32 if x is exact[-1] else torch.bfloat16)
            for x in exact
        ]
        g = given[-1].requires_grad_()
        o, _ = chunk_scan(*given, scale=0.25)
        (got,) = torch.autograd.grad(o, g, do.to(o))
        error = (got.double().cpu() - want).abs()
        late = want[:, 33:]
        assert late.abs().max() < 1e-2 * want.abs().max()
        assert error[:, 33:].max() <= 1e-4 * late.abs().max()


def test_no_gradient_through_a_closed_gate(backend):
    """A gate of -inf has the gradient 0, exactly, and nothing is NaN."""
    for decay in ("scalar", "vector"):
        case = Case(decay, T=80)
        given = case.given(backend.device)
        given["g"][:, 20] = given["g"][:, 21] = given["g"][:, 70] = -torch.inf
        given = {name: x.requires_grad_() for name, x in given.items()}
        o, final = chunk_scan(**given, output_final_state=True)
        found = torch.autograd.grad((o**2).sum() + (final**2).sum(), list(given.values()))
        assert all(torch.isfinite(x).all() for x in found)
        dg = dict(zip(given, found))["g"]
        assert not dg[:, 20:22].any()
        assert not dg[:, 70].any()


def test_gradients_by_differences():
    for decay in DECAYS:
        case = Case(decay, 3, 2, 5, gate=-0.5, H=2, HK=1, cu_seqlens=(0, 2, 2, 5))
        given = {n: x for n, x in case.inputs().items() if x is not None}
        tensors = [x.requires_grad_() for x in given.values()]
        edges = torch.tensor(case.cu_seqlens)

        def call(*xs, given=given, edges=edges):
            return chunk_scan(**dict(zip(given, xs)), cu_seqlens=edges, output_final_state=True)

        assert torch.autograd.gradcheck(call, tensors)
