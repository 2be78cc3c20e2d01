"""Calls without elements, of any strides, on every backend: empty or zero results, no error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

# Elements that no kernel could read by, and that torch lets tensors without elements have.
STRIDES = (999, 77, 33, 1)
SPREAD = (1001, 7, 13, 5)


def tensor(*shape: int, strides: tuple[int, ...], device: str) -> Tensor:
    """Random; of these strides if there are no elements."""
    if math.prod(shape):
        return torch.randn(shape, device=device).to(torch.bfloat16).requires_grad_()
    strides = strides[-len(shape) :]
    x = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device=device)
    return x.requires_grad_()


SHAPES = {  # batch, seqlen_q, seqlen_k, heads, heads_kv
    "no batch": (0, 5, 9, 4, 2),
    "no queries": (2, 0, 9, 4, 2),
    "no keys": (2, 5, 0, 4, 2),
    "many queries, no keys": (2, 200, 0, 4, 1),
    "neither queries nor keys": (2, 0, 0, 4, 2),
}


@pytest.mark.parametrize("strides", [STRIDES, SPREAD, (0, 0, 0, 1)], ids=str)
@pytest.mark.parametrize("mods", [{}, {"softcap": 5.0}, {"causal": True}], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dense(shape, d, mods, strides, device, needs):
    batch, seqlen_q, seqlen_k, heads, heads_kv = shape
    q = tensor(batch, seqlen_q, heads, d, strides=strides, device=device)
    k, v = (tensor(batch, seqlen_k, heads_kv, d, strides=strides, device=device) for _ in range(2))
    with needs("backward"):
        out, lse = flash_attn_func(q, k, v, return_lse=True, **mods)
        assert out.shape == (batch, seqlen_q, heads, d)
        assert lse.shape == (batch, heads, seqlen_q)
        if seqlen_k == 0:
            assert not out.any()
            assert (lse == -math.inf).all()
        check_gradients(out, q, k, v)


def check_gradients(out: Tensor, *leaves: Tensor) -> None:
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for grad, leaf in zip(grads, leaves, strict=True):
        assert grad.shape == leaf.shape
        assert not grad.any()


@pytest.mark.parametrize("strides", [STRIDES, SPREAD], ids=str)
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize(("total_q", "total_k"), [(0, 9), (9, 0), (0, 0)])
def test_packed(total_q, total_k, d, strides, device, needs):
    """Three sequences, each without queries, without keys, or without both."""
    q = tensor(total_q, 4, d, strides=strides, device=device)
    k, v = (tensor(total_k, 2, d, strides=strides, device=device) for _ in range(2))
    ends = [
        torch.arange(4, dtype=torch.int32, device=device) * (total // 3)
        for total in (total_q, total_k)
    ]
    with needs("backward"):
        # The longest may be anything that is long enough.
        out, lse = flash_attn_varlen_func(q, k, v, *ends, 20, 20, return_lse=True)
        assert out.shape == (total_q, 4, d)
        assert lse.shape == (4, total_q)
        assert not out.any()
        check_gradients(out, q, k, v)


@pytest.mark.parametrize("strides", [STRIDES, SPREAD], ids=str)
@pytest.mark.parametrize("seqlen_q", [0, 1, 3, 100])
@pytest.mark.parametrize(("batch", "rows"), [(2, 0), (0, 9), (0, 0)])
def test_caches(batch, rows, seqlen_q, strides, device, needs):
    q = tensor(batch, seqlen_q, 4, 64, strides=strides, device=device).detach()
    k, v = (tensor(batch, rows, 2, 64, strides=strides, device=device).detach() for _ in range(2))
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    with needs("kvcache"):
        for cache_seqlens in (lengths, None):
            out, lse = flash_attn_with_kvcache(
                q, k, v, cache_seqlens=cache_seqlens, return_softmax_lse=True
            )
            assert out.shape == q.shape
            assert lse.shape == (batch, 4, seqlen_q)
            assert not out.any()


@pytest.mark.parametrize("strides", [STRIDES, SPREAD], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 100])
@pytest.mark.parametrize("page_size", [16, 5])
def test_no_pages(page_size, seqlen_q, strides, device, needs):
    """A pool that is empty, of which no sequence has a page."""
    q = torch.randn(2, seqlen_q, 4, 64, device=device).to(torch.bfloat16)
    k, v = (tensor(0, page_size, 2, 64, strides=strides, device=device).detach() for _ in range(2))
    table = torch.full((2, 3), -1, dtype=torch.int32, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    with needs("kvcache", "paged"):
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)
        assert not out.any()
