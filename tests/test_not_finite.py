"""NaN and infinity in q and k, on every backend: what they reach shows it, the rest does not."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BF16, FP16, FP32, FP64
from reference import attention_ref
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

VALUES = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
# One key, fewer than a vector holds, no multiple of that, more than a block of torch's kernel.
LENGTHS = pytest.mark.parametrize("seqlen", [1, 3, 40, 600])


def inputs(device: str, seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> list[Tensor]:
    """q (1, seqlen_q, 4, 64), k and v (1, seqlen_k, 2, 64)."""
    shapes = (seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2)
    return [torch.randn(1, *shape, 64).to(device, dtype) for shape in shapes]


def expected(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    out, lse, _ = attention_ref(q, k, v, **options)
    return out, lse


def check(out: Tensor, lse: Tensor, ref_out: Tensor, ref_lse: Tensor) -> None:
    """The same rows are bad, and the others right.

    Where a score is infinite, the reference's LSE is too; as the sum of exp(inf - inf) it is NaN.
    """
    out, lse, ref_out, ref_lse = (x.double() for x in (out, lse, ref_out, ref_lse))
    lse, ref_lse = (x.masked_fill(x == math.inf, math.nan) for x in (lse, ref_lse))
    torch.testing.assert_close(lse, ref_lse, equal_nan=True, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(out, ref_out, equal_nan=True, atol=2e-2, rtol=2e-2)


@VALUES
@DTYPES
@LENGTHS
@pytest.mark.parametrize("causal", [False, True])
def test_a_bad_query(device, needs, value, dtype, seqlen, causal):
    q, k, v = inputs(device, seqlen, seqlen, dtype)
    q[0, seqlen // 2, 1, 3] = value
    with needs(*({FP32: ["fp32"], FP64: ["fp64"]}.get(dtype, []))):
        out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
        check(out, lse, *expected(q, k, v, causal=causal))


@VALUES
@DTYPES
@LENGTHS
@pytest.mark.parametrize("mask", [{"causal": True}, {"window_size": (7, 2)}, {}], ids=str)
def test_a_bad_key(device, needs, value, dtype, seqlen, mask):
    """Rows before it in a causal mask, or outside its window, do not know."""
    q, k, v = inputs(device, seqlen, seqlen, dtype)
    k[0, seqlen // 2, 1, 3] = value
    with needs(*({FP32: ["fp32"], FP64: ["fp64"]}.get(dtype, []))):
        out, lse = flash_attn_func(q, k, v, return_lse=True, **mask)
        check(out, lse, *expected(q, k, v, **mask))


@VALUES
@LENGTHS
@pytest.mark.parametrize("options", ["sinks", "alibi"])
def test_a_bad_query_with_options(device, value, seqlen, options):
    q, k, v = inputs(device, 2, seqlen, BF16)
    q[0, 1, 1, 3] = value
    more = {"s_aux": torch.randn(4, device=device)}
    if options == "alibi":
        more = {"alibi_slopes": torch.rand(4, device=device)}
    out, lse = flash_attn_func(q, k, v, return_lse=True, **more)
    check(out, lse, *expected(q, k, v, **more))


@VALUES
@DTYPES
@LENGTHS
def test_a_bad_query_of_generation(device, needs, value, dtype, seqlen):
    q, k, v = inputs(device, 1, seqlen, dtype)
    q[0, 0, 1, 3] = value
    with needs("kvcache", *({FP32: ["fp32"], FP64: ["fp64"]}.get(dtype, []))):
        out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlen, return_softmax_lse=True)
        check(out, lse, *expected(q, k, v))


@VALUES
def test_a_bad_sequence_among_packed_ones(device, value):
    q, k, v = (x[0] for x in inputs(device, 45, 45, BF16))
    q[4, 1, 3] = value  # of the second sequence
    ends = torch.tensor([0, 3, 5, 45], dtype=torch.int32, device=device)
    out, lse = flash_attn_varlen_func(q, k, v, ends, ends, 40, 40, causal=True, return_lse=True)
    for start, stop in ((0, 3), (3, 5), (5, 45)):
        at = slice(start, stop)
        ref = expected(q[None, at], k[None, at], v[None, at], causal=True)
        check(out[None, at], lse[None, :, at], *ref)


@pytest.mark.parametrize("seqlen", [1, 3, 40])
def test_scores_that_are_all_minus_infinity(device, seqlen):
    q, k, v = inputs(device, 2, seqlen, BF16)
    k[0, :, 1] = -math.inf
    out, lse = flash_attn_func(q.abs(), k, v, return_lse=True)
    assert torch.isneginf(lse[0, 2:]).all()
    assert not out[0, :, 2:].any()
    assert lse[0, :2].isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("seqlen", [3, 40, 1100])
def test_gradients_of_a_bad_query_are_nan(device, needs, dtype, seqlen):
    q, k, v = inputs(device, seqlen, seqlen, dtype)
    q[0, seqlen // 2, 1, 3] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with needs("backward", *(["fp32"] if dtype == FP32 else [])):
        out = flash_attn_func(*leaves, causal=True)
        dq, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert dq[0, seqlen // 2, 1].isnan().all()
        seen = slice(0, seqlen // 2 + 1)
        assert dk[0, seen, 0].isnan().all()
        assert dv[0, seen, 0].isnan().all()
        assert dq[0, :, 2:].isfinite().all()
        assert dk[0, :, 1].isfinite().all()
