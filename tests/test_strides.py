"""Small tensors of any strides: slopes, on every path that reads them, and dropout's state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

BATCH, HEADS = 3, 4


def layouts(device: str) -> dict[str, Tensor]:
    """(batch, heads) or (heads,), in other strides than those of a contiguous tensor."""
    wide = torch.rand(BATCH, 4 * HEADS, device=device)
    return {
        "expanded": wide[0, :HEADS].expand(BATCH, -1),
        "same for all heads": wide[:, :1].expand(-1, HEADS),
        "slice of heads": wide[:, 3 : 3 + HEADS],
        "every other head": wide[:, : 2 * HEADS : 2],
        "transposed": torch.rand(HEADS, BATCH, device=device).t(),
        "every other slope": wide[1, : 2 * HEADS : 2],
        "one slope": wide[2, :1].expand(HEADS),
    }


NAMES = list(layouts("cpu"))


def inputs(device: str, seqlen: int) -> list[Tensor]:
    return [
        torch.randn(BATCH, seqlen, HEADS, 64, dtype=torch.bfloat16, device=device) for _ in range(3)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_slopes_dense(device, name):
    slopes = layouts(device)[name]
    assert not slopes.is_contiguous()
    q, k, v = inputs(device, 50)
    results = []
    for given in (slopes, slopes.contiguous()):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse, probs = flash_attn_func(
            *leaves, causal=True, alibi_slopes=given, return_attn_probs=True
        )
        out.backward(q)
        results.append([out, lse, probs, *(x.grad for x in leaves)])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", NAMES)
def test_slopes_varlen(device, name):
    slopes = layouts(device)[name]
    q, k, v = (x.flatten(0, 1) for x in inputs(device, 20))
    cu = torch.tensor([0, 10, 47, 60], dtype=torch.int32, device=device)
    results = []
    for given in (slopes, slopes.contiguous()):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash_attn_varlen_func(*leaves, cu, cu, 37, 37, causal=True, alibi_slopes=given)
        out.backward(q)
        results.append([out, *(x.grad for x in leaves)])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seqlen_q", [1, 90])
def test_slopes_kvcache(device, name, seqlen_q):
    slopes = layouts(device)[name]
    q, k, v = inputs(device, 90)
    used = torch.tensor([90, 5, 40], dtype=torch.int32, device=device)
    ours, expected = (
        flash_attn_with_kvcache(
            q[:, :seqlen_q], k, v, cache_seqlens=used, causal=True, alibi_slopes=given
        )
        for given in (slopes, slopes.contiguous())
    )
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("numbers", [[1, 5, 2, 7], [3]], ids=["every other", "expanded"])
def test_dropout_state(device, numbers):
    state = torch.tensor(numbers, device=device)
    state = state[::2] if len(numbers) > 2 else state.expand(2)
    q, k, v = inputs(device, 50)
    results = []
    for given in (state, state.contiguous()):
        options = (0.3, 0.125, True, -1, -1, 0.0, None)
        out, lse, _, used = torch.ops.flash_attn._flash_attn_forward(
            q, k, v, *options, False, rng_state=given
        )
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        torch.ops.flash_attn._flash_attn_backward(
            q, q, k, v, out, lse, dq, dk, dv, *options, False, rng_state=given
        )
        assert used.tolist() == state.tolist()
        results.append([out, lse, dq, dk, dv])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
