"""Offsets beyond 2^31 elements: views with huge strides of memory that is mapped but not there."""

from __future__ import annotations

import mmap

import pytest
import torch
from cases import BF16, Case, make_inputs
from compare import assert_accurate, assert_lse
from reference import attention_ref, standard_attention

from flash_attn import flash_attn_with_kvcache
from tests.kernels import library  # the one that every suite serves with: it registers once

from . import calls

FAR = 2**31 + 512  # elements
MAP_NORESERVE = 0x4000  # of Linux; Python has no name for it before 3.13


class Sparse:
    """Tensors with strides of their own, apart from each other in one huge mapping."""

    def __init__(self, elements: int):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self.memory = mmap.mmap(-1, 2 * elements, flags=flags)
        except OSError as reason:
            pytest.skip(f"no {2 * elements >> 30} GiB of addresses: {reason}")
        self.buffer = torch.frombuffer(self.memory, dtype=BF16)
        self.used = 0

    def copy(self, x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        view = self.buffer.as_strided(x.shape, strides, self.used)
        last = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
        self.used += (last // 64 + 1) * 64
        return view.copy_(x)


@pytest.mark.parametrize(
    "strides",
    [
        (FAR, 192, 64, 1),  # batch
        (64 * 200, FAR // 64, 64, 1),  # rows, of which the last ones are beyond
        (64 * 200, 64, FAR, 1),  # heads
    ],
    ids=["batch", "row", "head"],
)
def test_strides(kernels, strides):
    case = Case(b=2, sq=130, sk=140, h=2, hk=2, causal=True, layout="contiguous")
    x = make_inputs(case)
    out = torch.full((case.b, case.sq, case.h, case.d), float("nan"), dtype=BF16)
    sparse = Sparse(5 * 3 * FAR)
    q, k, v, out = (sparse.copy(t, strides) for t in (x.q, x.k, x.v, out))
    lse = torch.full((case.b, case.h, case.sq), float("nan"))
    call = calls.dense_call(q, k, v, out, lse, causal=True)
    kernels.run("fwd_sm80_bf16_d64_plain", call)
    expected, expected_lse, _ = attention_ref(x.q, x.k, x.v, causal=True)
    standard, _, _ = standard_attention(x.q, x.k, x.v, causal=True)
    assert_accurate("out", out, expected, standard)
    assert_lse("lse", lse, expected_lse)
    s_dmask = torch.full((case.b, case.h, case.sq, case.sk), float("nan"), dtype=BF16)
    kernels.probabilities("bf16", call | {"s_dmask": s_dmask.data_ptr()})
    assert_accurate("S_dmask", s_dmask, *(
        attention(x.q, x.k, x.v, causal=True)[2]
        for attention in (attention_ref, standard_attention)
    ))  # fmt: skip


@pytest.mark.parametrize("sq", [1, 70])
@pytest.mark.parametrize("has_pages", [True, False])
def test_caches(kernels, sq, has_pages):
    """Pages, or entries of a cache, that are so far apart."""
    gen = torch.Generator().manual_seed(5)
    q = torch.randn(1, sq, 4, 64, generator=gen).to(BF16)
    k, v = torch.randn(2, 3, 80, 2, 64, generator=gen).to(BF16)
    sparse = Sparse(2 * 3 * FAR)
    caches = [sparse.copy(x, (FAR, 128, 64, 1)) for x in (k, v)]
    order = torch.tensor([2, 0, 1], dtype=torch.int32)
    tensors = {"block_table": order[None]} if has_pages else {"cache_batch_idx": order[:1]}
    keys = [x[order.long()].flatten(0, 1)[: 200 if has_pages else 75][None] for x in (k, v)]
    rows = ["decode_sm80_bf16_d64_plain"] if sq == 1 else ["fwd_sm90_bf16_d64_plain"]
    if sq > 1:
        rows += ["paged_sm80_bf16_d64_plain" if has_pages else "fwd_sm80_bf16_d64_plain"]
    expected, expected_lse, _ = attention_ref(q, *keys, causal=True)
    standard, _, _ = standard_attention(q, *keys, causal=True)
    for row in rows:
        out, lse = calls.cached(
            kernels, row, q, *caches, num_splits=3 if sq == 1 else None, causal=True,
            cache_seqlens=torch.tensor([keys[0].shape[1]], dtype=torch.int32), **tensors,
        )  # fmt: skip
        assert_accurate("out", out, expected, standard)
        assert_lse("lse", lse, expected_lse)


def test_more_rows_than_an_int_counts(kernels, monkeypatch):
    """Of a cache's entries, one after the other. Hopper's forward would find them by that number:
    it refuses them, and another kernel serves the call."""
    gen = torch.Generator().manual_seed(6)
    q = torch.randn(2, 70, 1, 16, generator=gen).to(BF16)
    k, v = torch.randn(2, 3, 80, 1, 16, generator=gen).to(BF16)
    far = 16 * 2**30
    sparse = Sparse(2 * 3 * far)
    caches = [sparse.copy(x, (far, 16, 16, 1)) for x in (k, v)]
    order, used = (torch.tensor(x, dtype=torch.int32) for x in ([2, 0], [80, 80]))
    call = dict(cache_seqlens=used, cache_batch_idx=order)
    with pytest.raises(ValueError, match=r"fewer than 2\^31 rows"):
        calls.cached(kernels, "fwd_sm90_bf16_d64_plain", q, *caches, num_splits=None, **call)
    with library.serving(monkeypatch, 90):
        out = flash_attn_with_kvcache(q, *caches, **call)
    keys = k[[2, 0]], v[[2, 0]]
    assert_accurate("out", out, attention_ref(q, *keys)[0], standard_attention(q, *keys)[0])
