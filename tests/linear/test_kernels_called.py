"""What compiled kernels of linear attention are called with, and that their results are returned.

Stand-ins for the kernels, on torch operations, hold each argument to what `_kernels` says of it.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from flash_attn.linear import (
    _chunks,
    _delta,
    _delta_step,
    _kernels,
    _step,
    chunk_gated_delta_rule,
    chunk_scan,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_step,
    recurrent_step,
)
from tests.linear.cases import DECAYS, Backend, Case, check, packed

FAR = torch.nan  # what a kernel finds in memory that it has to write
calls: list[str] = []


def _checked(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, *states: Tensor | None) -> None:
    assert q.shape == k.shape
    assert v.numel()
    for x in (q, k, v):
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.stride(-1) == 1
        if x.shape[-1] % 8 == 0:
            assert not any(s * x.itemsize % 16 for s in x.stride()[:-1])
            assert x.data_ptr() % 16 == 0
    if g is not None:
        assert g.is_contiguous()
        assert g.dtype in (torch.float32, q.dtype)
        assert g.dim() != 1 or g.dtype == torch.float32
    for state in states:
        if state is not None:
            assert state.dtype == torch.float32
            *outer, rows, columns = state.stride()
            assert 1 in (rows, columns)
            inner, other = (-1, rows) if columns == 1 else (-2, columns)
            if state.shape[inner] % 4 == 0:
                assert state.data_ptr() % 16 == 0
                assert not any(s % 4 for s in (*outer, other))


def _is_blank(cu_seqlens: Tensor | None, *outputs: Tensor | None) -> None:
    """Tokens of no sequence are zeros before the call. Others are made worse."""
    for out in outputs:
        if out is None:
            continue
        assert out.is_contiguous()
        if cu_seqlens is None:
            out.fill_(FAR)
        else:
            first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
            assert not out[:, :first].any()
            assert not out[:, last:].any()
            out[:, first:last] = FAR


def forward(q, k, v, g, initial_state, cu_seqlens, scale, o, final_state) -> None:
    calls.append("forward")
    _checked(q, k, v, g, initial_state, final_state)
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int32
    _is_blank(cu_seqlens, o)
    found, state = _chunks.forward(_chunks.Scan(q, k, v, g, initial_state, cu_seqlens, scale))
    o.copy_(found)
    if final_state is not None:
        final_state.copy_(state)


def backward(
    q, k, v, g, initial_state, cu_seqlens, scale, do, dfinal_state, dq, dk, dv, dg, dinitial_state
) -> None:
    calls.append("backward")
    _checked(q, k, v, g, initial_state, dfinal_state, dinitial_state)
    _checked(q, k, do, g)
    _is_blank(cu_seqlens, dq, dk, dv, dg)
    shared = q.shape[2] != v.shape[2]
    assert dq.dtype == dk.dtype == (torch.float32 if shared else q.dtype)
    assert dq.shape == dk.shape == (*v.shape[:3], q.shape[-1])
    scan = _chunks.Scan(q, k, v, g, initial_state, cu_seqlens, scale)
    found = _chunks.backward(scan, do, dfinal_state, dg is not None)
    for out, x in ((dq, found.dq), (dk, found.dk), (dv, found.dv)):
        out.copy_(x)
    if dg is not None:
        assert dg.dtype == torch.float32
        assert dg.shape == (v.shape[:3] if g.dim() != 4 else g.shape)
        dg.copy_(found.dg if g.dim() == 4 else found.dg.squeeze(-1))
    if dinitial_state is not None:
        dinitial_state.copy_(found.dinitial_state)


def step(q, k, v, g, state, slots, scale, o) -> None:
    calls.append("step")
    _checked(q, k, v, g, state)
    assert slots is None or slots.dtype == torch.int32
    o.copy_(_step.step(q, k, v, g, state, slots, scale))


def delta_forward(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, normalizes, o, final_state
) -> None:
    calls.append("delta_forward")
    _checked(q, k, v, g, initial_state, final_state)
    for x in (g, beta):
        assert x.is_contiguous()
        assert x.dtype in (q.dtype, torch.float32)
    _is_blank(cu_seqlens, o)
    if normalizes:
        q, k = (_delta_step.normalized(x) for x in (q, k))
    scan = _chunks.Scan(q, k, v, g, initial_state, cu_seqlens, scale)
    got, state = _delta.forward(_delta.Delta(scan, beta))
    o.copy_(got)
    if final_state is not None:
        final_state.copy_(state)


def delta_step(q, k, v, g, beta, state, slots, scale, normalizes, of_sigmoid, o) -> None:
    calls.append("delta_step")
    _checked(q, k, v, g, state)
    assert beta is None or beta.dtype in (q.dtype, torch.float32)
    assert slots is None or slots.dtype == torch.int32
    o.copy_(_delta_step.step(q, k, v, g, beta, state, slots, scale, normalizes, of_sigmoid))


@pytest.fixture
def kernels(monkeypatch):
    names = {
        "_linear_forward": forward, "_linear_backward": backward, "_linear_step": step,
        "_linear_delta_forward": delta_forward, "_linear_delta_step": delta_step,
    }  # fmt: skip
    library = torch.library.Library("flash_attn", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kernel in names.items():
            library.impl(name, kernel, "CPU")
    monkeypatch.setattr(_kernels, "on_gpu", lambda q: True)
    monkeypatch.setattr(_kernels, "_registered", set(names))
    served = _kernels.Served(frozenset(DECAYS), max_k=64, max_v=64)
    monkeypatch.setattr(_kernels, "SERVED", dict.fromkeys(names, (served,)))
    calls.clear()
    yield
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", DECAYS)
def test_results_and_gradients(decay, dtype, kernels):
    for case in (
        Case(decay, dtype=dtype, B=2, v_first=True),
        Case(decay, K=7, V=5, dtype=dtype, H=4, HK=2, with_state=False),
        Case(decay, dtype=dtype, cu_seqlens=packed(65)),
        Case(decay, dtype=dtype, cu_seqlens=(3, 3, 20, 60), v_first=True),
    ):
        check(case, Backend("cpu"))
    assert calls == ["forward", "backward"] * 4


def test_strides_and_gradients_that_autograd_expanded(kernels):
    made = torch.randn(2, 4, 20, 3 * 16 + 1).bfloat16()
    q, k, v = (made[..., 1:].transpose(1, 2)[..., i::3].requires_grad_() for i in range(3))
    states = torch.randn(2, 4, 16, 40)[..., 1::2][..., :16].requires_grad_()
    for state in (None, states, torch.randn(1 + 2 * 4 * 256)[1:].view(2, 4, 16, 16)):
        o, final = chunk_scan(q, k, v, initial_state=state, output_final_state=True)
        (o.sum() + final.sum()).backward()
    assert calls == ["forward", "backward"] * 3


@pytest.mark.parametrize("changes", [dict(K=65), dict(V=65), dict(dtype=torch.float32), dict(T=0)])
def test_what_no_kernel_takes(changes, kernels):
    check(Case("scalar", **{"dtype": torch.bfloat16} | changes), Backend("cpu"))
    assert not calls


def test_a_kind_of_decay_without_a_kernel(kernels, monkeypatch):
    served = _kernels.Served(frozenset({"scalar"}))
    monkeypatch.setitem(_kernels.SERVED, "_linear_forward", (served,))
    check(Case("scalar", dtype=torch.bfloat16), Backend("cpu"))
    check(Case("vector", dtype=torch.bfloat16), Backend("cpu"))
    assert calls == ["forward", "backward", "backward"]


@pytest.mark.parametrize("K", [16, 24, 40])
@pytest.mark.parametrize("v_first", [False, True])
def test_a_vector_of_decays_in_tiles_of_k(v_first, K, kernels, monkeypatch):
    """16 of k's columns a call; o and dv are sums of what each call rounds."""
    served = _kernels.Served(frozenset({"vector"}), columns=16)
    for name in ("_linear_forward", "_linear_backward"):
        monkeypatch.setitem(_kernels.SERVED, name, (served,))
    dtype, tiles, cpu = torch.bfloat16, -(-K // 16), Backend("cpu", sums=2**-8)
    check(Case("vector", K, dtype=dtype, B=2, H=4, HK=2, v_first=v_first), cpu)
    check(Case("vector", K, dtype=dtype, with_state=False), cpu)
    check(Case("vector", K, dtype=dtype, cu_seqlens=(3, 3, 20, 60)), cpu)
    assert calls == (["forward"] * tiles + ["backward"] * tiles) * 3
    with torch.autocast("cpu", torch.bfloat16):  # refuses to join tensors of fp16
        check(Case("vector", K, dtype=torch.float16), cpu)


@pytest.mark.parametrize("v_first", [False, True])
def test_step(v_first, kernels):
    q, k, v = (torch.randn(3, h, d).bfloat16() for h, d in ((2, 8), (2, 8), (4, 6)))
    state = torch.randn(5, 4, 6, 8) if v_first else torch.randn(5, 4, 8, 6)
    slots, g, other = torch.tensor([4, -1, 0]), -torch.rand(3, 4), state.clone()
    o = recurrent_step(q, k, v, g, state, slots, 0.5, v_first)
    assert calls == ["step"]
    want = _step.step(q, k, v, g, other.mT if v_first else other, slots, 0.5)
    assert torch.equal(o, want)
    assert torch.equal(state, other)
    wide = torch.zeros(*state.shape[:-1], 2 * state.shape[-1])
    for other in (state.bfloat16(), wide[..., ::2]):  # what no kernel takes
        recurrent_step(q, k, v, g, other, slots, 0.5, v_first)
    assert calls == ["step"]


@pytest.mark.parametrize("v_first", [False, True])
def test_delta_step(v_first, kernels):
    q, k, v = (torch.randn(3, h, d).bfloat16() for h, d in ((2, 8), (2, 8), (4, 6)))
    state = torch.randn(5, 4, 6, 8) if v_first else torch.randn(5, 4, 8, 6)
    slots, g, other = torch.tensor([4, -1, 0]), -torch.rand(3, 4).double(), state.clone()
    beta = torch.randn(3, 4).bfloat16()
    flags = dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=v_first)
    o = recurrent_gated_delta_rule_step(q, k, v, g, beta, state, slots, 0.5, **flags)
    assert calls == ["delta_step"]
    cache = other.mT if v_first else other
    want = _delta_step.step(q, k, v, g.float(), beta, cache, slots, 0.5, False, 2.0)
    assert torch.equal(o, want)
    assert torch.equal(state, other)
    wide = torch.zeros(*state.shape[:-1], 2 * state.shape[-1])
    for other in (state.bfloat16(), wide[..., ::2]):  # what no kernel takes
        recurrent_gated_delta_rule_step(q, k, v, g, beta, other, slots, 0.5, state_v_first=v_first)
    assert calls == ["delta_step"]


def test_a_token_of_the_delta_rule_is_a_step_unless_it_needs_gradients(kernels):
    q, k, v = (torch.randn(3, 1, h, d).bfloat16() for h, d in ((2, 8), (2, 8), (4, 6)))
    fused_recurrent_gated_delta_rule(q, k, v)
    assert calls == ["delta_step"]
    o, _ = fused_recurrent_gated_delta_rule(q, k.requires_grad_(), v)
    o.sum().backward()
    assert calls == ["delta_step", "delta_forward"]


@pytest.mark.parametrize("v_first", [False, True])
def test_delta_forward(v_first, kernels):
    made = torch.randn(2, 4, 20, 3 * 16 + 1).bfloat16()
    q, k, v = (made[..., 1:].transpose(1, 2)[..., i::3] for i in range(3))
    g, beta = -torch.rand(2, 4, 20).double().mT, torch.rand(2, 20, 4).bfloat16()
    states = torch.randn(2, 4, 16, 40)[..., 1::2][..., :16]
    for state in (None, states, torch.randn(1 + 2 * 4 * 256)[1:].view(2, 4, 16, 16)):
        given = dict(initial_state=state, output_final_state=True, state_v_first=v_first)
        o, final = chunk_gated_delta_rule(q, k, v, g, beta, **given)
        wide = (x.float() for x in (q, k, v, g, beta))
        want, want_final = chunk_gated_delta_rule(*wide, **given)
        torch.testing.assert_close(o.float(), want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(final, want_final)
    edges = torch.tensor([3, 3, 15])
    packed = [x[:1] for x in (q, k, v, g, beta)]
    got, _ = chunk_gated_delta_rule(*packed, cu_seqlens=edges, use_qk_l2norm_in_kernel=True)
    packed[:2] = (_delta_step.normalized(x) for x in packed[:2])
    assert torch.equal(got, chunk_gated_delta_rule(*packed, cu_seqlens=edges)[0])
    assert calls == ["delta_forward"] * 5
