"""The gated delta rule against its recurrence."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flash_attn.linear import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_step,
)
from tests.linear.cases import GATES, HEAD_DIMS, SEQLENS, packed
from tests.linear.reference import delta_rule

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def inputs(
    K: int, V: int, T: int, gate: float, B=1, H=1, HV=2, sequences=None
) -> dict[str, Tensor]:
    """float64, exact in fp32; k of norm 1, without which the rule's state grows."""
    g = -torch.rand(B, T, HV) * 0.1
    g.view(-1)[::5] = gate
    given = {
        "q": torch.randn(B, T, H, K),
        "k": F.normalize(torch.randn(B, T, H, K), dim=-1),
        "v": torch.randn(B, T, HV, V),
        "g": g,
        "beta": torch.rand(B, T, HV),
        "initial_state": torch.randn(B if sequences is None else sequences, HV, K, V),
    }
    return {name: x.double() for name, x in given.items()}


def compare(exact: dict[str, Tensor], device: str, dtype, bar: float, edges=None, v_first=False):
    """Results and gradients, each within ``bar`` of its largest number."""
    K = exact["k"].shape[-1]
    exact = {name: x.requires_grad_() for name, x in exact.items()}
    given = {}
    for name, x in exact.items():
        own = dtype if name in "qkv" else torch.promote_types(dtype, torch.float32)
        x = x.detach().mT if v_first and name == "initial_state" else x.detach()
        given[name] = x.to(device, own, copy=True).requires_grad_()
    seqlens = None if edges is None else torch.tensor(edges, device=device)
    o, final = chunk_gated_delta_rule(
        **given, cu_seqlens=seqlens, output_final_state=True, state_v_first=v_first
    )
    want_o, want_final = delta_rule(*(exact[n] for n in NAMES[:5]), K**-0.5, exact[NAMES[5]], edges)
    do, dfinal = torch.randn_like(want_o), torch.randn_like(want_final)
    loss = (want_o * do).sum() + (want_final * dfinal).sum()
    want = torch.autograd.grad(loss, list(exact.values()), materialize_grads=True)
    dfinal = dfinal.mT if v_first else dfinal
    got = torch.autograd.grad([o, final], list(given.values()), [do.to(o), dfinal.to(final)])
    final, got = final.mT if v_first else final, list(got)
    got[-1] = got[-1].mT if v_first else got[-1]
    for name, x, y in zip(("o", "final", *NAMES), (o, final, *got), (want_o, want_final, *want)):
        assert x.shape == y.shape, name
        if x.numel():
            error = (x.double().cpu() - y.detach()).abs().max()
            assert error <= bar * (1 + y.abs().max()), f"{name}: {error}"


@pytest.mark.parametrize("K", HEAD_DIMS)
def test_brute_force(K, backend):
    for n, (V, T) in enumerate(itertools.product(HEAD_DIMS, SEQLENS), HEAD_DIMS.index(K)):
        if K * V > 2000 and (n // len(SEQLENS)) % len(SEQLENS) != n % len(SEQLENS):
            continue
        edges = list(packed(T)) if n % 3 == 1 else None
        sequences = None if edges is None else len(edges) - 1
        exact = inputs(K, V, T, GATES[n % 5], sequences=sequences)
        compare(exact, backend.device, torch.float32, 1e-4, edges, n % 2 == 1)


@pytest.mark.parametrize("T", [70, 200])
def test_exact_in_float64(T, monkeypatch):
    compare(inputs(16, 8, T, -5.0, B=2, H=2, HV=4), "cpu", torch.float64, 1e-12)
    monkeypatch.setattr("flash_attn.linear._chunks.Scan.chunks_at_a_time", lambda *_: 1)
    compare(inputs(16, 8, T, -torch.inf, B=2, H=2, HV=4), "cpu", torch.float64, 1e-12)
    edges = list(packed(T))
    compare(inputs(16, 8, T, -1.0, sequences=len(edges) - 1), "cpu", torch.float64, 1e-12, edges)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, backend):
    exact = inputs(32, 24, 130, -0.5, B=2)
    for name in "qkv":
        exact[name] = exact[name].to(dtype).double()
    compare(exact, backend.device, dtype, 2**-7)


def test_norms_and_sigmoids(backend):
    """What "in kernel" does is what the caller would do."""
    given = {n: x.to(backend.device, torch.float32) for n, x in inputs(16, 8, 70, -1.0).items()}
    q, k, beta = given["q"], given["k"] * 3, given["beta"] * 4 - 2
    rest = {n: given[n] for n in ("v", "g", "initial_state")}

    def normal(x):
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    want, _ = chunk_gated_delta_rule(normal(q), normal(k), beta=2 * beta.sigmoid(), **rest)
    flags = dict(
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True
    )
    got, _ = chunk_gated_delta_rule(q, k, beta=beta, **rest, **flags)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        chunk_gated_delta_rule(q, k, beta=beta, **rest, allow_neg_eigval=True)


def test_gradients_through_norms():
    given = inputs(16, 8, 70, -1.0, H=2, HV=4)
    q, k = (given[n].mul_(3).requires_grad_() for n in "qk")
    rest = {n: given[n] for n in ("v", "g", "beta", "initial_state")}
    o, _ = chunk_gated_delta_rule(q, k, **rest, use_qk_l2norm_in_kernel=True)
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, (q, k), do)
    normal = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    o, _ = chunk_gated_delta_rule(*normal, **rest)
    for x, y in zip(got, torch.autograd.grad(o, (q, k), do), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("v_first", [False, True])
def test_token_by_token(v_first, backend):
    """Steps of one token, each from the state of the one before, are the chunks."""
    exact = inputs(16, 8, 20, -1.0, B=2, HV=3)
    given = {n: x.to(backend.device, torch.float32) for n, x in exact.items()}
    state = given.pop("initial_state")
    state = state.mT.contiguous() if v_first else state
    flags = dict(output_final_state=True, state_v_first=v_first, use_qk_l2norm_in_kernel=True)
    want, want_final = chunk_gated_delta_rule(**given, initial_state=state, **flags)
    before, outputs = state.clone(), []
    step = state
    for t in range(20):
        token = {n: x[:, t : t + 1] for n, x in given.items()}
        o, step = fused_recurrent_gated_delta_rule(**token, initial_state=step, **flags)
        outputs.append(o)
    assert torch.equal(state, before)
    torch.testing.assert_close(torch.cat(outputs, 1), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step, want_final, rtol=1e-4, atol=1e-5)


def test_what_a_step_refuses():
    q, v, state = torch.randn(2, 2, 6), torch.randn(2, 4, 5), torch.randn(2, 4, 6, 5)
    step = recurrent_gated_delta_rule_step
    with pytest.raises(ValueError, match="state"):
        step(q, q, v, None, None, state.mT)
    with pytest.raises(ValueError, match="beta"):
        step(q, q, v, None, v[:, :2, 0], state)
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        step(q, q, v, None, None, state, allow_neg_eigval=True)
    with pytest.raises(ValueError, match="state_indices"):
        step(q, q, v, None, None, state, torch.tensor([1]))
    with pytest.raises(ValueError, match="g: "):
        fused_recurrent_gated_delta_rule(q[:, None], q[:, None], v[:, None], v[:, :, 0])
