"""``flash_attn_with_kvcache`` under FA3's names, and rows and new keys of different lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from cache_cases import CacheCase, expected, make_cache
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, standard_attention
from torch import Tensor

import flash_attn_interface as fa3


def call(case: CacheCase, x, **more):
    extra = dict(x.extra)
    if "block_table" in extra:
        extra["page_table"] = extra.pop("block_table")
    lengths = torch.tensor(case.cache_seqlens, dtype=torch.int32, device=x.q.device)
    given = {
        "k": x.k, "v": x.v, "cache_seqlens": lengths, "softmax_scale": case.scale,
        "causal": case.causal, "window_size": case.window, "softcap": case.softcap,
        "rotary_interleaved": case.interleaved, "return_softmax_lse": True,
    }  # fmt: skip
    return fa3.flash_attn_with_kvcache(more.pop("q", x.q), x.k_cache, x.v_cache,
                                       **given | extra | more)  # fmt: skip


def check_cache(case: CacheCase, x, before, ref) -> None:
    for name in ("k_cache", "v_cache"):
        ours, old, new = (getattr(of, name) for of in (x, before, ref))
        assert_bitwise(f"{name}, old rows", ours[~ref.touched], old[~ref.touched])
        torch.testing.assert_close(ours[ref.touched], new[ref.touched])


CASES = [
    CacheCase("read", sq=3),
    CacheCase("append", new=2, sq=2, rotary_dim=32, interleaved=False),
    CacheCase("rows", new=2, sq=2, batch_idx=True, leftpad=(30, 5, 0), sinks=True),
    CacheCase("pages", new=3, sq=3, page_size=16, softcap=3.0, causal=False, window=(20, 0)),
    CacheCase("left_out", new=1, cache_seqlens=(37, -1, 3), alibi="bh"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dense_rows(case, device):
    x = make_cache(case, device)
    before = x.clone()
    ref, std = (expected(case, before, f) for f in (attention_ref, standard_attention))
    out, lse, *rest = call(case, x)
    assert rest == []
    assert_accurate("out", out, ref.out, std.out)
    assert_lse("lse", lse, ref.lse)
    check_cache(case, x, before, ref)


# --- Packed rows, packed new keys -----------------------------------------------------------------

PACKED = [
    CacheCase("read"),
    CacheCase("read_pages", page_size=16, softcap=3.0),
    CacheCase("read_rows", batch_idx=True, leftpad=(30, 5, 0), sinks=True),
    CacheCase("append", new=1),
    CacheCase("append_pages", new=1, page_size=16, rotary_dim=64),
    CacheCase("append_rows_rotary", new=1, batch_idx=True, rotary_dim=32, interleaved=False),
    CacheCase("append_not_causal_rotary", new=1, causal=False, rotary_dim=64),
    CacheCase("append_window_alibi", new=1, causal=False, window=(20, 0), alibi="bh"),
    CacheCase("append_beside_one_left_out", new=1, cache_seqlens=(37, -1, 3), leftpad=(2, 0, 1)),
    CacheCase("append_pages_beside_one_left_out", new=1, cache_seqlens=(-1, 20, 31), page_size=16),
]
ROWS, NEW = (3, 1, 5), (2, 6, 3)  # of each sequence


def one(case: CacheCase, x, b: int, after: bool):
    """Sequence b of a packed case as a case of its own: the reference knows one length a call."""
    lengths = tuple(n if i == b else -1 for i, n in enumerate(case.cache_seqlens))
    return replace(case, cache_seqlens=lengths, new=NEW[b] if after else 0, sq=ROWS[b])


def packed(case: CacheCase, device: str):
    """The inputs, with room for NEW, and packed q, k and v (None if nothing is appended)."""
    roomy = replace(case, new=max(NEW) if case.new else 0)
    x = make_cache(roomy, device)
    gen = torch.Generator().manual_seed(1)

    def rows(total: int, heads: int) -> Tensor:
        x = torch.randn(total, heads, case.d, generator=gen)
        return x.to(case.dtype).to(device)

    q = rows(sum(ROWS) + 2, case.h)  # two rows of no sequence
    x.k, x.v = (rows(sum(NEW) + 2, case.hk) for _ in "kv") if case.new else (None, None)
    return x, q


def ends(device: str, lengths) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_packed_rows(case, bare, device):
    x, q = packed(case, device)
    before = x.clone()
    more = {"cu_seqlens_q": ends(device, ROWS), "max_seqlen_q": max(ROWS), "q": q}
    if case.new or bare:  # an engine that has written its pages itself sends them without keys
        more["cu_seqlens_k_new"] = ends(device, NEW)
    if bare:
        more["max_seqlen_q"] = None
    out, lse = call(case, x, **more)
    assert out.shape == q.shape
    check_packed(case, x, q, before, out, lse)


def check_packed(case: CacheCase, x, q, before, out: Tensor, lse: Tensor | None) -> None:
    cache = before
    row = new = 0
    for b in range(case.b):
        mine = one(case, x, b, case.new > 0)
        rows, keys = slice(row, row + ROWS[b]), slice(new, new + NEW[b])
        row, new = rows.stop, keys.stop
        inputs = replace(cache, q=_for_each(q[rows], case.b))
        if case.new:
            inputs = replace(inputs, k=_for_each(x.k[keys], case.b), v=_for_each(x.v[keys], case.b))
        ref, std = (expected(mine, inputs, f) for f in (attention_ref, standard_attention))
        if case.cache_seqlens[b] < 0:
            assert not out[rows].any()
        else:
            assert_accurate("out", out[None, rows], ref.out[b : b + 1], std.out[b : b + 1])
            if lse is not None:
                assert_lse("lse", lse[None, :, rows].contiguous(), ref.lse[b : b + 1])
        cache = replace(cache, k_cache=ref.k_cache, v_cache=ref.v_cache)
    assert not out[row:].any()
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(getattr(x, name), getattr(cache, name), equal_nan=True)


def _for_each(x: Tensor, batch: int) -> Tensor:
    return x[None].expand(batch, *x.shape)


def test_dense_rows_beside_packed_new_keys(device):
    case = CacheCase("append", new=1, sq=2, page_size=16)
    x, _ = packed(case, device)
    before = x.clone()
    q = torch.randn(3, 2, case.h, case.d, device=device).to(case.dtype)
    out, lse = call(case, x, q=q, cu_seqlens_k_new=ends(device, NEW))
    assert out.shape == q.shape
    assert lse.shape == (3, case.h, 2)
    cache, new = before, 0
    for b in range(3):
        mine = replace(one(case, x, b, True), sq=2)
        keys = slice(new, new + NEW[b])
        new = keys.stop
        inputs = replace(cache, q=q, k=_for_each(x.k[keys], 3), v=_for_each(x.v[keys], 3))
        ref, std = (expected(mine, inputs, f) for f in (attention_ref, standard_attention))
        assert_accurate("out", out[b : b + 1], ref.out[b : b + 1], std.out[b : b + 1])
        assert_lse("lse", lse[b : b + 1].contiguous(), ref.lse[b : b + 1])
        cache = replace(cache, k_cache=ref.k_cache, v_cache=ref.v_cache)
    torch.testing.assert_close(x.k_cache, cache.k_cache, equal_nan=True)


def test_no_new_keys_at_all_write_nothing(device):
    case = CacheCase("append", new=1)
    x, q = packed(case, device)
    before = x.clone()
    nothing = torch.zeros(4, dtype=torch.int32, device=device)
    call(case, x, q=q, cu_seqlens_q=ends(device, ROWS), cu_seqlens_k_new=nothing)
    assert_bitwise("k_cache", x.k_cache, before.k_cache)
    assert_bitwise("v_cache", x.v_cache, before.v_cache)


def test_the_whole_cache_without_lengths(device):
    q, k, v = (torch.randn(2, n, 2, 32, device=device).bfloat16() for n in (3, 40, 40))
    expected = fa3.flash_attn_func(q, k, v, causal=True)
    dense = fa3.flash_attn_with_kvcache(q, k, v, causal=True)
    packed = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1), k, v, cu_seqlens_q=ends(device, (3, 3)), max_seqlen_q=3, causal=True
    )
    for out in (dense, packed.unflatten(0, (2, 3))):
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    one_length = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1), k, v, cache_seqlens=7, cu_seqlens_q=ends(device, (3, 3)), causal=True
    )
    expected = fa3.flash_attn_func(q, k[:, :7], v[:, :7], causal=True)
    torch.testing.assert_close(one_length.unflatten(0, (2, 3)), expected, atol=1e-2, rtol=1e-2)


BAD = {
    "cu_seqlens_k_new: got shape": {"cu_seqlens_k_new": ends("cpu", (2, 6))},
    "k: got shape": {"k": torch.randn(13, 3, 64).bfloat16()},
    "v: got dtype": {"v": torch.randn(13, 2, 64)},
    "appended together": {"v": None},
    "cache_seqlens: got None": {"cache_seqlens": None},
    "more than the 150 keys": {"cache_seqlens": torch.tensor([37, 149, 3], dtype=torch.int32)},
    "come together": {"rotary_cos": torch.randn(150, 16)},
    "cache_batch_idx: got one with page_table": {
        "page_table": torch.zeros(3, 1, dtype=torch.int32),
        "cache_batch_idx": torch.arange(3, dtype=torch.int32),
    },
    "cache_batch_idx: got shape": {"cache_batch_idx": torch.arange(2, dtype=torch.int32)},
    "rotary_cos: got a table without k": {"k": None, "v": None, "rotary_cos": torch.ones(150, 8)},
    "q: got shape": {"cu_seqlens_q": None},
}


@pytest.mark.parametrize("said", BAD)
def test_bad_packed_calls(said):
    case = CacheCase("append", new=1)
    x, q = packed(case, "cpu")
    before = x.clone()
    given = {
        "q": q, "cu_seqlens_q": ends("cpu", ROWS), "cu_seqlens_k_new": ends("cpu", NEW)
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        call(case, x, **given | BAD[said])
    assert_bitwise("k_cache", x.k_cache, before.k_cache)


def test_a_cache_that_requires_a_gradient_is_not_written():
    x, q = packed(CacheCase("append", new=1), "cpu")
    x.k_cache.requires_grad_()
    with pytest.raises(RuntimeError, match="requires_grad is set"):
        call(CacheCase("append", new=1), x, q=q, cu_seqlens_q=ends("cpu", ROWS),
             cu_seqlens_k_new=ends("cpu", NEW))  # fmt: skip
