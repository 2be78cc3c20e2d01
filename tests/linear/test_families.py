"""Functions by their names elsewhere: each is the core with the decay that its paper gives."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flash_attn import linear
from tests.linear.reference import recurrence


def drawn(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device)


@pytest.fixture
def qkv(backend):
    return [drawn(backend.device, 2, 40, 4, size) for size in (8, 8, 12)]


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("T", [1, 40])
def test_fixed_decays(form, T, qkv):
    q, k, v = (x[:, :T] for x in qkv)
    retention = torch.tensor([math.log(1 - 2 ** (-5 - h)) for h in range(4)]).to(q)
    lightning = torch.tensor([-8 * h / 4 * (1 - 2 / 6) for h in range(4)]).to(q)
    state = drawn(q.device, 2, 4, 8, 12)
    for name, decay, rest in (
        ("retention", retention, {}),
        ("lightning_attn", lightning, {"layer_idx": 2, "num_layers": 6}),
    ):
        function = getattr(linear, f"{form}_{name}")
        o, final = function(q, k, v, **rest, initial_state=state, output_final_state=True)
        want, want_final = recurrence(q, k, v, decay, 8**-0.5, state)
        torch.testing.assert_close(o, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(final, want_final, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("T", [1, 40])
def test_simple_gla(form, T, qkv):
    q, k, v = (x[:, :T] for x in qkv)
    g, gamma = -drawn(q.device, 2, T, 4).abs(), -drawn(q.device, 4).abs()
    function = getattr(linear, f"{form}_simple_gla")
    for given, decay in (
        ({}, None),
        ({"g": g}, g),
        ({"g_gamma": gamma}, gamma),
        ({"g": g, "g_gamma": gamma}, g + gamma),
    ):
        o, final = function(q, k, v, **given, scale=0.5, output_final_state=True)
        want, want_final = recurrence(q, k, v, decay, 0.5)
        torch.testing.assert_close(o, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(final, want_final, rtol=1e-6, atol=1e-6)
    assert function(q, k, v, g)[1] is None


def normalised(q, k, v, z=None):
    keys = k.cumsum(1) if z is None else k.cumsum(1) + z[:, None]
    o, _ = recurrence(q, k, v, None, 1.0)
    return o / ((q * keys).sum(-1, keepdim=True) + 1e-10), keys[:, -1]


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_linear_attn(form, qkv):
    q, k, v = qkv[0].exp(), qkv[1].exp(), qkv[2]
    function = getattr(linear, f"{form}_linear_attn")
    o, (state, z) = function(q, k, v, scale=1.0, normalize=True, output_final_state=True)
    want, want_z = normalised(q, k, v)
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(z, want_z)
    halves = [x.split(17, 1)[0] for x in (q, k, v)], [x[:, 17:] for x in (q, k, v)]
    first, states = function(*halves[0], scale=1.0, normalize=True, output_final_state=True)
    second, last = function(
        *halves[1], scale=1.0, normalize=True, initial_state=states, output_final_state=True
    )
    torch.testing.assert_close(torch.cat((first, second), 1)[:, :17], want[:, :17])
    torch.testing.assert_close(last, (state, z))
    with pytest.raises(ValueError, match="normalize"):
        function(q, k, v, initial_state=states, normalize=False)
    o, _ = function(q, k, v, normalize=False)
    torch.testing.assert_close(o, recurrence(q, k, v, None, 8**-0.5)[0])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gates", ["", "k", "v", "kv"])
@pytest.mark.parametrize("edges", [None, [0, 3, 3, 17, 38]])
def test_gla_by_rows_and_columns(edges, gates, reverse, backend):
    q, k = drawn(backend.device, 1, 40, 2, 6), drawn(backend.device, 1, 40, 2, 6)
    v = drawn(backend.device, 1, 40, 2, 5)
    gk = -drawn(backend.device, 1, 40, 2, 6).abs() if "k" in gates else None
    gv = -drawn(backend.device, 1, 40, 2, 5).abs() if "v" in gates else None
    state = drawn(backend.device, 1 if edges is None else 4, 2, 6, 5)
    want, finals = torch.zeros_like(v), []
    bounds = [0, 40] if edges is None else edges
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        S = state[n]
        order = range(start, end)
        for t in reversed(order) if reverse else order:
            if gk is not None:
                S = S * gk[0, t].exp()[..., None]
            if gv is not None:
                S = S * gv[0, t].exp()[:, None]
            S = S + k[0, t, :, :, None] * v[0, t, :, None]
            want[0, t] = (q[0, t, :, None] @ S)[:, 0] * 0.3
        finals.append(S)
    seqlens = None if edges is None else torch.tensor(edges, device=backend.device)
    o, final = linear.fused_recurrent_gla(
        q, k, v, gk, gv, 0.3, state.mT.contiguous(), True, reverse, True, seqlens
    )
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(final.mT, torch.stack(finals))


@pytest.mark.parametrize("indices", [None, [3, -1, 0]])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("decay", [None, (4,), (3, 4), (3, 4, 8)])
def test_step_on_a_cache(decay, v_first, indices, backend):
    device = backend.device
    q, k, v = (drawn(device, 3, heads, size) for heads, size in ((2, 8), (2, 8), (4, 5)))
    g = None if decay is None else -drawn(device, *decay).abs()
    cache = drawn(device, 3 if indices is None else 6, 4, 8, 5)
    given = cache.mT.contiguous() if v_first else cache.clone()
    slots = None if indices is None else torch.tensor(indices, device=device)
    o = linear.recurrent_step(q, k, v, g, given, slots, 0.7, v_first)
    after = given.mT if v_first else given
    by_token = None if g is None else g if g.dim() == 1 else g[:, None]
    for b, slot in enumerate(indices or range(3)):
        if slot < 0:
            assert not o[b].any()
            continue
        gate = by_token if by_token is None or by_token.dim() == 1 else by_token[b : b + 1]
        row = [x[b : b + 1, None] for x in (q, k, v)]
        want, state = recurrence(*row, gate, 0.7, cache[slot : slot + 1])
        torch.testing.assert_close(o[b], want[0, 0])
        torch.testing.assert_close(after[slot], state[0])
    untouched = set(range(len(cache))) - set(indices or range(3))
    for slot in untouched:
        assert torch.equal(after[slot], cache[slot])
