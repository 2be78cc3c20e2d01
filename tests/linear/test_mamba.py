"""Mamba 2's scan, step and block against its recurrence, with all its options."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flash_attn import linear
from flash_attn.linear import mamba_chunk_scan_combined, selective_state_update

BATCH, T, H, P, G, N = 2, 70, 4, 6, 2, 5
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")


def inputs(device: str, batch: int = BATCH, sequences: int = BATCH) -> dict[str, Tensor]:
    shapes = dict(
        x=(batch, T, H, P), dt=(batch, T, H), A=(H,), B=(batch, T, G, N), C=(batch, T, G, N),
        D=(H,), z=(batch, T, H, P), dt_bias=(H,), initial_states=(sequences, H, P, N),
    )  # fmt: skip
    given = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    given["A"] = -given["A"].exp()
    return {name: x.to(device).requires_grad_() for name, x in given.items()}


def scan(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None, begins=(), softplus=True,
    limit=(0.0, float("inf")),
):  # fmt: skip
    """Token by token; ``begins`` are tokens at which the state begins anew, from zeros."""
    if dt_bias is not None:
        dt = dt + dt_bias
    dt = (F.softplus(dt) if softplus else dt).clamp(*limit)
    B, C = (t.repeat_interleave(H // G, dim=2) for t in (B, C))
    S = x.new_zeros(len(x), H, P, N) if initial_states is None else initial_states
    out = []
    for t in range(x.shape[1]):
        S = torch.zeros_like(S) if t in begins else S
        S = S * (dt[:, t] * A).exp()[..., None, None]
        S = S + dt[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None]
        y = (S @ C[:, t, :, :, None]).squeeze(-1)
        if D is not None:
            y = y + x[:, t] * (D if D.dim() == 2 else D[:, None])
        out.append(y if z is None else y * F.silu(z[:, t]))
    return torch.stack(out, 1), S


def same(got: tuple, want: tuple, tensors: list[Tensor]) -> None:
    """Results, and gradients of both."""
    weights = [torch.randn_like(x) for x in want]
    gradients = [
        torch.autograd.grad(list(results), tensors, weights, allow_unused=True, retain_graph=True)
        for results in (got, want)
    ]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.1, 0.5)])
@pytest.mark.parametrize("without", [(), ("D", "z", "dt_bias", "initial_states")])
def test_options(without, limit, softplus, backend):
    given = {n: x for n, x in inputs(backend.device).items() if n not in without}
    want = scan(**given, softplus=softplus, limit=limit)
    options = dict(dt_softplus=softplus, dt_limit=limit)
    got = mamba_chunk_scan_combined(**given, chunk_size=32, **options, return_final_states=True)
    same(got, want, list(given.values()))
    alone = mamba_chunk_scan_combined(**given, chunk_size=32, **options)
    assert torch.equal(alone, got[0])


def test_skip_of_each_channel(backend):
    given = inputs(backend.device)
    given["D"] = torch.randn(H, P, dtype=torch.float64, device=backend.device).requires_grad_()
    got = mamba_chunk_scan_combined(**given, dt_softplus=True, return_final_states=True)
    same(got, scan(**given), list(given.values()))


def test_seq_idx(backend):
    """The state begins anew where the number changes; the initial one is the first sequence's."""
    given = inputs(backend.device)
    begins = (20, 21, 60)
    seq_idx = torch.zeros(BATCH, T, dtype=torch.int32, device=backend.device)
    for t in begins:
        seq_idx[:, t:] += 1
    got = mamba_chunk_scan_combined(
        **given, seq_idx=seq_idx, dt_softplus=True, return_final_states=True
    )
    same(got, scan(**given, begins=begins), list(given.values()))


@pytest.mark.parametrize("states", [1, 4])
def test_packed(states, backend):
    edges = [0, 20, 20, 41, 70]
    given = inputs(backend.device, 1, states)
    seqlens = torch.tensor(edges, dtype=torch.int32, device=backend.device)
    out, last, varlen = mamba_chunk_scan_combined(
        **given, cu_seqlens=seqlens, dt_softplus=True, return_final_states=True,
        return_varlen_states=True,
    )  # fmt: skip
    initial = given.pop("initial_states")
    outs, finals = [], []
    for n, (start, end) in enumerate(itertools.pairwise(edges)):
        part = {k: x[:, start:end] if x.dim() > 2 else x for k, x in given.items()}
        state = initial[n : n + 1] if n < states else torch.zeros_like(initial[:1])
        if start == end:
            finals.append(state)
            continue
        o, S = scan(**part, initial_states=state)
        outs.append(o)
        finals.append(S)
    same((out, varlen), (torch.cat(outs, 1), torch.cat(finals)), [*given.values(), initial])
    assert torch.equal(last, varlen[-1:])


def test_wrong_arguments(backend):
    given = inputs(backend.device)
    with pytest.raises(ValueError, match="return_varlen_states: needs cu_seqlens"):
        mamba_chunk_scan_combined(**given, return_varlen_states=True)
    with pytest.raises(ValueError, match="dt: got shape"):
        mamba_chunk_scan_combined(**given | {"dt": given["x"]})
    with pytest.raises(ValueError, match="A: got shape"):
        mamba_chunk_scan_combined(**given | {"A": given["x"][0]})


@pytest.mark.parametrize("indices", [None, [2, -1, 0]])
@pytest.mark.parametrize("kind", ["head", "elementwise"])
def test_step(kind, indices, backend):
    """One token a row against a cache: Mamba 2's decays of a head, and Mamba 1's of each number."""
    device, rows = backend.device, 3

    def drawn(*shape):
        return torch.randn(shape, dtype=torch.float64).to(device)

    x, z, B, C, D = (
        drawn(rows, H, P),
        drawn(rows, H, P),
        drawn(rows, G, N),
        drawn(rows, G, N),
        drawn(H, P),
    )
    if kind == "head":
        dt, bias = drawn(rows, H, 1).expand(-1, -1, P), drawn(H, 1).expand(-1, P)
        A = -drawn(H, 1, 1).exp().expand(-1, P, N)
    else:
        dt, bias, A = drawn(rows, H, P), drawn(H, P), -drawn(H, P, N).exp()
    state = drawn(rows if indices is None else 5, H, P, N)
    before = state.clone()
    slots = None if indices is None else torch.tensor(indices, device=device)
    out = selective_state_update(state, x, dt, A, B, C, D, z, bias, True, slots)
    step = F.softplus(dt + bias)
    B, C = (t.repeat_interleave(H // G, dim=1) for t in (B, C))
    for row, slot in enumerate(indices or range(rows)):
        if slot < 0:
            assert not out[row].any()
            continue
        S = before[slot] * (step[row, :, :, None] * A).exp()
        S = S + (step[row] * x[row])[..., None] * B[row, :, None]
        y = (S @ C[row, :, :, None]).squeeze(-1) + D * x[row]
        torch.testing.assert_close(out[row], y * F.silu(z[row]))
        torch.testing.assert_close(state[slot], S)
    for slot in set(range(len(state))) - set(indices or range(rows)):
        assert torch.equal(state[slot], before[slot])


def test_step_without_heads(backend):
    """[batch, P] tensors of one head, as Mamba 1 has them."""

    def drawn(*shape):
        return torch.randn(shape, dtype=torch.float64).to(backend.device)

    state, x, dt, A = drawn(3, P, N), drawn(3, P), drawn(3, P), -drawn(P, N).exp()
    B, C, before = drawn(3, N), drawn(3, N), state.clone()
    before.copy_(state)
    out = selective_state_update(state, x, dt, A, B, C, dt_softplus=True)
    step = F.softplus(dt)
    want = before * (step[..., None] * A).exp() + (step * x)[..., None] * B[:, None]
    torch.testing.assert_close(state, want)
    torch.testing.assert_close(out, (want * C[:, None]).sum(-1))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_block(with_norm, norm_first, backend):
    """The block is what its parts are."""
    device = backend.device

    def drawn(*shape):
        return torch.randn(shape, dtype=torch.float64).to(device)

    inner, mixed = H * P, H * P + 2 * G * N
    zxbcdt, weight, bias = drawn(BATCH, T, inner + mixed + H), drawn(mixed, 4), drawn(mixed)
    A, D, dt_bias, out_weight = -drawn(H).exp(), drawn(H), drawn(H), drawn(7, inner)
    norm = drawn(inner) if with_norm else None
    out, final = linear.mamba_split_conv1d_scan_combined(
        zxbcdt, weight, bias, dt_bias, A, D, 16, return_final_states=True, rmsnorm_weight=norm,
        outproj_weight=out_weight, headdim=P, ngroups=G, norm_before_gate=norm_first,
    )  # fmt: skip
    z, xBC, dt = zxbcdt.split((inner, mixed, H), -1)
    xBC = F.conv1d(xBC.mT, weight[:, None], bias, padding=3, groups=mixed)[..., :T].mT
    x, B, C = F.silu(xBC).split((inner, G * N, G * N), -1)
    heads = [t.unflatten(-1, (n, -1)) for t, n in ((x, H), (B, G), (C, G))]
    y, want_final = scan(heads[0], dt, A, heads[1], heads[2], D, None, dt_bias)
    y, gate = y.flatten(2), F.silu(z)
    if norm is None:
        y = y * gate
    else:
        y = y if norm_first else y * gate
        groups = y.unflatten(-1, (G, -1))
        y = (groups / (groups.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2) * norm
        y = y * gate if norm_first else y
    torch.testing.assert_close(out, y @ out_weight.mT)
    torch.testing.assert_close(final, want_final)
    with pytest.raises(ValueError, match="headdim"):
        linear.mamba_split_conv1d_scan_combined(zxbcdt, weight, bias, dt_bias, A, D)
    with pytest.raises(ValueError, match="zxbcdt"):
        linear.mamba_split_conv1d_scan_combined(zxbcdt, weight, bias, dt_bias, A, D, headdim=5)
