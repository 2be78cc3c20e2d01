"""The operations in torch's eyes: opcheck, compile, export, fakes, errors."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from flash_attn import linear
from flash_attn.linear import chunk_gated_delta_rule, chunk_scan, delta_ops, ops, recurrent_step
from tests.linear.cases import DECAYS, Case


def forward_inputs(decay: str, device: str, **changes) -> dict:
    given = Case(decay, 6, 5, 20, H=4, HK=2, **changes).given(device)
    return {name: given.get(name) for name in ("q", "k", "v", "g", "initial_state")}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("wants_state", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_opcheck(decay, wants_state, v_first, backend):
    given = forward_inputs(decay, backend.device, with_state=v_first)
    tensors = [None if x is None else x.requires_grad_() for x in given.values()]
    edges = torch.tensor([0, 20], dtype=torch.int32, device=backend.device) if v_first else None
    torch.library.opcheck(ops.forward, (*tensors, edges, 0.3, wants_state, v_first))
    plain = [None if x is None else x.detach() for x in tensors]
    do = torch.randn_like(plain[2])
    torch.library.opcheck(ops.backward, (*plain, edges, 0.3, do, None, decay != "none", v_first))


def test_opcheck_step(backend):
    q, k, v = (torch.randn(3, h, d, device=backend.device) for h, d in ((2, 6), (2, 6), (4, 5)))
    state = torch.randn(4, 4, 6, 5, device=backend.device)
    slots = torch.tensor([3, -1, 0], dtype=torch.int32, device=backend.device)
    operation = torch.ops.flash_attn.linear_step.default
    torch.library.opcheck(operation, (q, k, v, -torch.rand_like(v[..., 0]), state, slots, 0.5))


def test_opcheck_delta(backend):
    q, k = (torch.randn(2, 20, 2, 6, device=backend.device) for _ in range(2))
    v, state = torch.randn(2, 20, 4, 5).to(q), torch.randn(2, 4, 6, 5).to(q)
    g, beta = -torch.rand(2, 20, 4).to(q), torch.rand(2, 20, 4).to(q)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta, state)]
    operation = torch.ops.flash_attn.delta_forward.default
    torch.library.opcheck(operation, (*inputs, None, 0.3, False, True, True))
    torch.library.opcheck(operation, (*inputs, None, 0.3, True, True, False))
    plain = [x.detach() for x in inputs]
    torch.library.opcheck(delta_ops.backward, (*plain, None, 0.3, torch.ones_like(v), None))


def delta_step_inputs(device: str) -> tuple:
    """q, k, v, g, beta, states and slots"""
    q, k, v = (torch.randn(3, h, d, device=device) for h, d in ((2, 6), (2, 6), (4, 5)))
    g, beta = -torch.rand_like(v[..., 0]), torch.rand_like(v[..., 0])
    slots = torch.tensor([3, -1, 0], dtype=torch.int32, device=device)
    return q, k, v, g, beta, torch.randn(4, 4, 6, 5, device=device), slots


def test_opcheck_delta_step(backend):
    operation = torch.ops.flash_attn.delta_step.default
    given = delta_step_inputs(backend.device)
    torch.library.opcheck(operation, (*given, 0.5, True, 2.0))
    torch.library.opcheck(operation, (*given[:3], None, None, *given[5:], 0.5, False, 0.0))


FUNCTIONS = {
    "chunk_gla": lambda q, k, v, g, x: linear.chunk_gla(q, k, v, g, output_final_state=True),
    "chunk_simple_gla": lambda q, k, v, g, x: linear.chunk_simple_gla(
        q, k, v, g[..., 0], output_final_state=True, state_v_first=True
    ),
    "fused_recurrent_gla": lambda q, k, v, g, x: linear.fused_recurrent_gla(
        q, k, v, gk=g, reverse=True, cu_seqlens=x
    ),
    "chunk_retention": lambda q, k, v, g, x: linear.chunk_retention(q, k, v, cu_seqlens=x),
    "chunk_lightning_attn": lambda q, k, v, g, x: linear.chunk_lightning_attn(q, k, v, 1, 4),
    "chunk_linear_attn": lambda q, k, v, g, x: linear.chunk_linear_attn(q.exp(), k.exp(), v),
    "chunk_gated_delta_rule": lambda q, k, v, g, x: linear.chunk_gated_delta_rule(
        q, k, v, g[..., 0], g[..., 1].exp(), use_qk_l2norm_in_kernel=True, cu_seqlens=x
    ),
    "mamba_chunk_scan_combined": lambda q, k, v, g, x: linear.mamba_chunk_scan_combined(
        v, g[..., 0], -g[0, 0, :, 0].exp(), k, q, z=v, D=v[0, 0, :, 0], dt_softplus=True,
        seq_idx=torch.arange(20, device=v.device)[None] // 7,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compile_in_one_graph(name, backend):
    torch._dynamo.reset()
    device = backend.device
    q, k, v = (torch.randn(1, 20, 2, size, device=device) for size in (6, 6, 5))
    g = -torch.rand(1, 20, 2, 6, device=device)
    inputs = [x.requires_grad_() for x in (q, k, v, g)]
    edges = torch.tensor([0, 4, 20], dtype=torch.int32, device=device)
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")

    def run(function):
        found = function(*inputs, edges)
        results = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
        loss = sum(x.square().sum() for x in results)
        return results, torch.autograd.grad(loss, inputs, allow_unused=True)

    torch.testing.assert_close(run(compiled), run(FUNCTIONS[name]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_derivatives_raise(name, backend):
    """An operation would return tensors without them."""
    q, k, v = (torch.randn(1, 20, 2, size, device=backend.device) for size in (6, 6, 5))
    g = -torch.rand(1, 20, 2, 6, device=backend.device)
    with forward_ad.dual_level():
        FUNCTIONS[name](q, k, v, g, None)  # there are none to lose
        dual = forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            FUNCTIONS[name](q, dual, v, g, None)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: FUNCTIONS[name](q, x, v, g, None), (k,), (k,))


def test_forward_mode_derivatives_of_one_token_raise(backend):
    q, k, v = (torch.randn(2, 3, size, device=backend.device) for size in (6, 6, 5))
    state = torch.randn(2, 3, 6, 5, device=backend.device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k, torch.ones_like(k))
        for call in (
            lambda: recurrent_step(q, dual, v, None, state),
            lambda: linear.fused_recurrent_gla(q[:, None], dual[:, None], v[:, None]),
            lambda: linear.recurrent_gated_delta_rule_step(q, dual, v, None, None, state),
        ):
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                call()


def test_compile_a_step(backend):
    q, k, v = (torch.randn(2, 3, size, device=backend.device) for size in (6, 6, 5))
    state = torch.randn(2, 3, 6, 5, device=backend.device)
    other = state.clone()
    compiled = torch.compile(recurrent_step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, None, state), recurrent_step(q, k, v, None, other))
    torch.testing.assert_close(state, other)


def test_compile_a_step_of_the_delta_rule(backend):
    *given, state, slots = delta_step_inputs(backend.device)
    other = state.clone()
    step = linear.recurrent_gated_delta_rule_step
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = compiled(*given, state, slots, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(got, step(*given, other, slots, use_qk_l2norm_in_kernel=True))
    torch.testing.assert_close(state, other)


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v, g):
            return chunk_scan(q, k, v, g, output_final_state=True)

    given = [torch.randn(2, 20, 2, 6) for _ in range(3)]
    given.append(-torch.rand(2, 20, 2))
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(
        Model(), tuple(given), dynamic_shapes=[{1: tokens} for _ in given]
    )
    longer = [torch.cat((x, x), 1) for x in given]
    torch.testing.assert_close(program.module()(*longer), Model()(*longer))


def test_autocast_rounds_nothing(backend):
    """Tensors of fp32 are computed in fp32 under autocast: what it may round, it rounds before."""
    device = backend.device
    for T in (1, 40):
        q, k, v = (torch.randn(1, T, 2, 8, device=device) for _ in range(3))
        g = -torch.rand(1, T, 2, 8, device=device)
        state = torch.randn(1, 2, 8, 8, device=device)
        for call in (
            lambda q, k, v, g, s: linear.chunk_gla(q, k, v, g, None, s),
            lambda q, k, v, g, s: linear.fused_recurrent_gla(q, k, v, g, g, None, s),
            lambda q, k, v, g, s: linear.fused_recurrent_simple_gla(q, k, v, g[..., 0]),
            lambda q, k, v, g, s: linear.fused_recurrent_gated_delta_rule(q, k, v, g[..., 0]),
        ):
            inputs = q, k, v, g, state
            want, _ = call(*inputs)
            with torch.autocast(device, torch.bfloat16):
                got, _ = call(*inputs)
                tracked = [x.clone().requires_grad_() for x in inputs]
                gradient = torch.autograd.grad(call(*tracked)[0].sum(), tracked[2])[0]
            assert torch.equal(got, want)
            expected = torch.autograd.grad(call(*tracked)[0].sum(), tracked[2])[0]
            assert torch.equal(gradient, expected)


def test_no_second_derivative(backend):
    given = forward_inputs("scalar", backend.device)
    tensors = {n: x.requires_grad_() for n, x in given.items()}
    o, _ = chunk_scan(**tensors)
    (dq,) = torch.autograd.grad(o.square().sum(), tensors["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dq.sum().backward()


def test_only_what_is_wanted(backend):
    """Gradients of o alone, of the final state alone, and of some inputs."""
    given = forward_inputs("vector", backend.device)
    tensors = {n: x.requires_grad_() for n, x in given.items()}
    o, final = chunk_scan(**tensors, output_final_state=True)
    of_both = torch.autograd.grad(o.sum() + final.sum(), tensors["k"], retain_graph=True)[0]
    of_o = torch.autograd.grad(o.sum(), tensors["k"], retain_graph=True)[0]
    of_final = torch.autograd.grad(final.sum(), tensors["k"], retain_graph=True)[0]
    torch.testing.assert_close(of_o + of_final, of_both)
    for name in given:
        frozen = {n: x.detach() for n, x in given.items()}
        frozen[name].requires_grad_()
        o, _ = chunk_scan(**frozen)
        got = torch.autograd.grad(o.sum(), frozen[name])[0]
        o, _ = chunk_scan(**tensors)
        torch.testing.assert_close(got, torch.autograd.grad(o.sum(), tensors[name])[0])


BAD = {
    "q: got float": (dict(q=1.0), TypeError, "q: got float"),
    "rank": (dict(q=torch.randn(2, 20, 6)), ValueError, "q: got shape"),
    "dtype": (dict(k=torch.randn(2, 20, 2, 6).double()), ValueError, "k: got torch.float64"),
    "integers": (dict(q=torch.ones(2, 20, 2, 6).long()), ValueError, "q: got dtype"),
    "k's shape": (dict(k=torch.randn(2, 20, 2, 7)), ValueError, "k: got shape"),
    "tokens of v": (dict(v=torch.randn(2, 21, 4, 5)), ValueError, "v: got shape"),
    "heads": (dict(v=torch.randn(2, 20, 3, 5)), ValueError, "v: got 3 heads"),
    "no columns": (dict(v=torch.randn(2, 20, 4, 0)), ValueError, "head dim >= 1"),
    "g": (dict(g=torch.randn(2, 20, 2)), ValueError, "g: got shape"),
    "scale": (dict(scale=float("nan")), ValueError, "scale: got nan"),
    "flag as scale": (dict(scale=True), ValueError, "scale: got True"),
    "state": (dict(initial_state=torch.randn(2, 4, 5, 6)), ValueError, "initial_state: got shape"),
    "state's dtype": (
        dict(initial_state=torch.ones(2, 4, 6, 5).long()), ValueError, "initial_state: got torch",
    ),
    "batch of packed": (dict(cu_seqlens=torch.tensor([0, 20])), ValueError, "got B = 2"),
    "floats": (dict(cu_seqlens=torch.tensor([0.0, 20])), ValueError, "cu_seqlens: got dtype"),
    "rank of cu_seqlens": (dict(cu_seqlens=torch.tensor(20)), ValueError, "cu_seqlens: got shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments(name):
    changes, error, message = BAD[name]
    given = forward_inputs("scalar", "cpu", B=2)
    with pytest.raises(error, match=message):
        chunk_scan(**given | changes)


@pytest.mark.parametrize("edges", [[0, 5, 3, 20], [0, 21], [-1, 20]])
def test_wrong_lengths(edges):
    given = forward_inputs("scalar", "cpu", with_state=False)
    with pytest.raises(ValueError, match="do not decrease"):
        chunk_scan(**given, cu_seqlens=torch.tensor(edges))


def test_wrong_steps():
    q, v = torch.randn(2, 3, 6), torch.randn(2, 3, 5)
    state = torch.randn(2, 3, 6, 5)
    with pytest.raises(ValueError, match="state: got shape"):
        recurrent_step(q, q, v, None, state.mT)
    with pytest.raises(ValueError, match=r"q: got shape \(3, 6\); a tensor \[B, H, D\]"):
        recurrent_step(q[0], q, v, None, state)
    with pytest.raises(ValueError, match="g: got shape"):
        recurrent_step(q, q, v, q[0, :2], state)
    with pytest.raises(ValueError, match="state_indices: got shape"):
        recurrent_step(q, q, v, None, state, torch.tensor([1]))


@pytest.mark.parametrize("size", [0, 3, True, 64.0])
def test_chunk_sizes(size):
    q = torch.randn(1, 4, 1, 2)
    with pytest.raises(ValueError, match="chunk_size"):
        linear.chunk_simple_gla(q, q, q, chunk_size=size)


def test_other_wrong_arguments():
    q = torch.randn(1, 4, 1, 2)
    with pytest.raises(ValueError, match="g: a tensor"):
        linear.chunk_gla(q, q, q, q[..., 0])
    with pytest.raises(ValueError, match="g: got shape"):
        linear.chunk_simple_gla(q, q, q, q)
    with pytest.raises(ValueError, match="g_gamma: got shape"):
        linear.chunk_simple_gla(q, q, q, g_gamma=q)
    with pytest.raises(ValueError, match="layer_idx"):
        linear.chunk_lightning_attn(q, q, q, 4, 4)
    with pytest.raises(ValueError, match="beta: got shape"):
        chunk_gated_delta_rule(q, q, q, None, q)


@pytest.mark.parametrize("B, H", [(0, 2), (2, 0)])  # noqa: PT006
def test_no_elements(B, H):
    for decay in DECAYS:
        given = Case(decay, B=B, H=H, HK=H).given("cpu")
        tensors = {name: x.requires_grad_() for name, x in given.items()}
        o, final = chunk_scan(**tensors, output_final_state=True)
        assert o.shape == (B, 65, H, 16)
        found = torch.autograd.grad(o.sum() + final.sum(), list(tensors.values()))
        assert [x.shape for x in found] == [x.shape for x in tensors.values()]


def test_no_sequences(backend):
    """Tokens, of which no sequence has any."""
    device = backend.device
    q, k, v = (torch.randn(1, 5, 2, 4, device=device, requires_grad=True) for _ in range(3))
    g = -torch.rand(1, 5, 2, device=device)
    edges = torch.zeros(1, dtype=torch.int32, device=device)
    for function in (linear.chunk_simple_gla, chunk_gated_delta_rule):
        o, final = function(q, k, v, g, cu_seqlens=edges, output_final_state=True)
        assert final.shape == (0, 2, 4, 4)
        found = torch.autograd.grad(o.sum() + final.sum(), (q, k, v))
        assert not any(x.any() for x in (o, *found))
