"""FlashAttention-3's ``qv``: latent caches under its names."""

from __future__ import annotations

import pytest
import torch
from compare import assert_accurate, assert_lse
from reference import attention_ref, standard_attention
from torch import Tensor

import flash_attn_interface as fa3

BF16 = torch.bfloat16
B, ROOM, H, D, DV = 3, 40, 4, 64, 512
USED = [37, 1, 20]


def randn(device, *shape: int) -> Tensor:
    gen = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=gen).to(BF16).to(device)


def int32(device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def call(device, *rows: int) -> dict:
    """q, k, v and qv of so many rows: (B, s), or (total,)."""
    cache = randn(device, B, ROOM, 1, DV + D)
    return {
        "q": randn(device, *rows, H, D), "k_cache": cache[..., DV:], "v_cache": cache[..., :DV],
        "qv": randn(device, *rows, H, DV),
    }  # fmt: skip


def check(out: Tensor, lse: Tensor, q: Tensor, qv: Tensor, k: Tensor, v: Tensor, **options) -> None:
    """Of one sequence: out (rows, H, DV), lse (H, rows)."""
    x = torch.cat([qv, q], -1)[None], torch.cat([v, k], -1)[None], v[None]
    ref, ref_lse, _ = attention_ref(*x, **options)
    standard, _, _ = standard_attention(*x, **options)
    assert_accurate("out", out, ref[0], standard[0])
    assert_lse("lse", lse.contiguous(), ref_lse[0])


def test_a_step(device, needs):
    x = call(device, B, 2)
    with needs("kvcache"):
        out, lse = fa3.flash_attn_with_kvcache(
            **x, cache_seqlens=int32(device, *USED), causal=True, return_softmax_lse=True
        )
    for b, used in enumerate(USED):
        keys = x["k_cache"][b, :used], x["v_cache"][b, :used]
        check(out[b], lse[b], x["q"][b], x["qv"][b], *keys, causal=True)


def test_packed_queries(device, needs):
    """Against a cache of rows, which are its pages."""
    x = call(device, 6)
    with needs("paged"):
        out, lse = fa3.flash_attn_with_kvcache(
            **x, cache_seqlens=int32(device, *USED), cu_seqlens_q=int32(device, 0, 1, 4, 6),
            max_seqlen_q=3, causal=True, return_softmax_lse=True,
        )  # fmt: skip
    for b, (used, at) in enumerate(zip(USED, (slice(0, 1), slice(1, 4), slice(4, 6)))):
        keys = x["k_cache"][b, :used], x["v_cache"][b, :used]
        check(out[at], lse[:, at], x["q"][at], x["qv"][at], *keys, causal=True)


def test_new_keys_of_different_lengths(device, needs):
    x = call(device, B, 1)
    new = randn(device, 4, 1, DV + D)
    before = x["k_cache"].clone(), x["v_cache"].clone()
    with needs("paged"):
        out, lse = fa3.flash_attn_with_kvcache(
            **x, k=new[..., DV:].contiguous(), v=new[..., :DV].contiguous(),
            cache_seqlens=int32(device, *USED), cu_seqlens_k_new=int32(device, 0, 1, 1, 4),
            return_softmax_lse=True,
        )  # fmt: skip
    for b, (used, at) in enumerate(zip(USED, (slice(0, 1), slice(1, 1), slice(1, 4)))):
        k = torch.cat([before[0][b, :used], new[at, :, DV:]])
        v = torch.cat([before[1][b, :used], new[at, :, :DV]])
        assert torch.equal(x["v_cache"][b, : v.shape[0]], v)
        check(out[b], lse[b], x["q"][b], x["qv"][b], k, v)


@pytest.mark.parametrize("queries", [1, 3])
def test_chunks(queries, device, needs):
    x = call(device, B, queries)
    with needs("paged", "leftpad"):
        out, lse = fa3.flash_attn_with_kvcache(
            **x, causal=True, attention_chunk=16, return_softmax_lse=True
        )
    for b in range(B):
        keys = x["k_cache"][b, 32:], x["v_cache"][b, 32:]  # the last rows see the last chunk
        check(out[b], lse[b], x["q"][b], x["qv"][b], *keys, causal=True)


def test_dense_keys_are_taken_as_a_cache(device, needs):
    x = call(device, B, ROOM)
    with needs("kvcache"):
        out, lse, *_ = fa3.flash_attn_func(
            x["q"], x["k_cache"], x["v_cache"], qv=x["qv"], causal=True, return_attn_probs=True
        )
    for b in range(B):
        check(out[b], lse[b], x["q"][b], x["qv"][b], x["k_cache"][b], x["v_cache"][b], causal=True)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"qv": 3}, TypeError),
        ({"qv": randn("cpu", 1, B, H, DV)}, ValueError),
        ({"qv": randn("cpu", B, 1, H, D)}, ValueError),
    ],
    ids=["number", "shape", "columns"],
)
def test_nothing_is_written_before_a_refusal(changes, error):
    x = call("cpu", B, 1) | changes
    before = x["v_cache"].clone()
    new = randn("cpu", 4, 1, DV + D)
    with pytest.raises(error, match=r"^qv: got "):
        fa3.flash_attn_with_kvcache(
            **x, k=new[..., DV:].contiguous(), v=new[..., :DV].contiguous(),
            cache_seqlens=int32("cpu", *USED), cu_seqlens_k_new=int32("cpu", 0, 1, 1, 4),
        )  # fmt: skip
    assert torch.equal(x["v_cache"], before)


def test_dense_calls_have_neither_dropout_nor_gradients():
    x = call("cpu", B, ROOM)
    arguments = x["q"], x["k_cache"], x["v_cache"]
    with pytest.raises(NotImplementedError, match=r"^dropout_p: got 0.5 with a qv"):
        fa3.flash_attn_func(*arguments, qv=x["qv"], dropout_p=0.5)
    with pytest.raises(RuntimeError, match=r"^q: requires_grad is set; attention with a qv"):
        fa3.flash_attn_func(x["q"].requires_grad_(), *arguments[1:], qv=x["qv"])


def test_pages_with_lengths_of_cu_seqlens_k(device, needs):
    x = call(device, 6)
    pages = {name: x[f"{name}_cache"].unflatten(1, (4, 10)).flatten(0, 1) for name in "kv"}
    with needs("paged"):
        out, lse = fa3.flash_attn_varlen_func(
            x["q"], **pages, qv=x["qv"], cu_seqlens_q=int32(device, 0, 1, 4, 6),
            cu_seqlens_k=int32(device, 0, 37, 38, 58), max_seqlen_q=3, max_seqlen_k=40,
            page_table=torch.arange(12, dtype=torch.int32, device=x["q"].device).view(3, 4),
            causal=True, return_attn_probs=True,
        )  # fmt: skip
    for b, (used, at) in enumerate(zip(USED, (slice(0, 1), slice(1, 4), slice(4, 6)))):
        keys = x["k_cache"][b, :used], x["v_cache"][b, :used]
        check(out[at], lse[:, at], x["q"][at], x["qv"][at], *keys, causal=True)


def test_operator(device, needs):
    x = call(device, B, 1)
    with needs("kvcache"):
        out, lse, *_ = torch.ops.flash_attn_3.fwd(
            x["q"], x["k_cache"], x["v_cache"], q_v=x["qv"], seqused_k=int32(device, *USED)
        )
    for b, used in enumerate(USED):
        keys = x["k_cache"][b, :used], x["v_cache"][b, :used]
        check(out[b], lse[b], x["q"][b], x["qv"][b], *keys)
