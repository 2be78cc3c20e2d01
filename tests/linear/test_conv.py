"""Short convolutions against torch's own, sequence by sequence."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from flash_attn.linear import ShortConvolution, causal_conv1d_fn, causal_conv1d_update

D, W = 5, 4


def drawn(device, *shape):
    return torch.randn(shape, dtype=torch.float64).to(device).requires_grad_()


def by_torch(x, weight, bias, before=None, activation="silu"):
    """x [B, D, T]."""
    if not x.shape[-1]:
        return x
    before = x.new_zeros(*x.shape[:2], W - 1) if before is None else before[..., -(W - 1) :]
    out = F.conv1d(torch.cat((before, x), -1), weight[:, None], bias, groups=D)
    return F.silu(out) if activation else out


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("T", [0, 1, 2, 9])
def test_dense(T, activation, backend):
    x, weight, bias = (drawn(backend.device, *s) for s in ((2, D, T), (D, W), (D,)))
    before = drawn(backend.device, 2, D, W - 1)
    out, final = causal_conv1d_fn(x, weight, bias, None, before, True, activation=activation)
    want = by_torch(x, weight, bias, before, activation)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(final, torch.cat((before, x), -1)[..., -(W - 1) :])
    if T:
        inputs = (x, weight, bias, before)
        do = torch.randn_like(out)
        torch.testing.assert_close(
            torch.autograd.grad(out, inputs, do), torch.autograd.grad(want, inputs, do)
        )


EDGES = [0, 2, 2, 3, 9, 12]


def test_seq_idx(backend):
    x, weight = drawn(backend.device, 1, D, 12), drawn(backend.device, D, W)
    lengths = torch.tensor(EDGES).diff()
    seq_idx = torch.repeat_interleave(torch.arange(5), lengths)[None].to(backend.device)
    out = causal_conv1d_fn(x, weight, seq_idx=seq_idx)
    want = [by_torch(part, weight, None, None, None) for part in x.split(lengths.tolist(), -1)]
    torch.testing.assert_close(out, torch.cat(want, -1))
    with pytest.raises(ValueError, match="initial_states"):
        causal_conv1d_fn(x, weight, seq_idx=seq_idx, initial_states=x)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("indices", [None, [4, 0]])
@pytest.mark.parametrize("size", [W - 1, W + 2])
def test_update(size, indices, T, backend):
    x, weight, bias = (drawn(backend.device, *s) for s in ((2, D, T), (D, W), (D,)))
    state = drawn(backend.device, 2 if indices is None else 6, D, size).detach()
    before, slots = state.clone(), indices or [0, 1]
    given = None if indices is None else torch.tensor(indices, device=backend.device)
    with torch.no_grad():
        out = causal_conv1d_update(x, state, weight, bias, "silu", None, given)
        one = x[..., 0] if T == 1 else None
        if one is not None:
            again = before.clone()
            torch.testing.assert_close(
                causal_conv1d_update(one, again, weight, bias, "silu", None, given), out[..., 0]
            )
    torch.testing.assert_close(out, by_torch(x, weight, bias, before[slots]).detach())
    kept = torch.cat((before[slots], x), -1)[..., -size:].detach()
    torch.testing.assert_close(state[slots], kept)
    with pytest.raises(NotImplementedError, match="cache_seqlens"):
        causal_conv1d_update(x, state, weight, cache_seqlens=torch.zeros(2))


@pytest.mark.parametrize("with_cache", [False, True])
def test_module(with_cache, backend):
    """Packed sequences from their last inputs, as each by itself; residual and mask."""
    module = ShortConvolution(D, W, bias=True, dtype=torch.float64, device=backend.device)
    assert [tuple(p.shape) for p in module.parameters()] == [(D, 1, W), (D,)]
    weight, bias = module.weight[:, 0], module.bias
    x = drawn(backend.device, 1, 14, D)
    cache = drawn(backend.device, 5, D, W) if with_cache else None
    edges = torch.tensor(EDGES, device=backend.device)
    out, final = module(x, cache=cache, output_final_state=True, cu_seqlens=edges)
    for n, (start, end) in enumerate(itertools.pairwise(EDGES)):
        own = x[:, start:end]
        before = None if cache is None else cache[n : n + 1]
        alone, last = module(own, cache=before, output_final_state=True)
        torch.testing.assert_close(out[:, start:end], alone)
        torch.testing.assert_close(final[n : n + 1], last)
        if end > start:
            torch.testing.assert_close(alone.mT, by_torch(own.mT, weight, bias, before))
    mask = (torch.arange(14, device=backend.device) < 9)[None]
    masked, _ = module(x, residual=x, mask=mask)
    torch.testing.assert_close(masked, module(x * mask[..., None])[0] + x)
    with pytest.raises(ValueError, match="activation"):
        ShortConvolution(D, W, activation="relu")
