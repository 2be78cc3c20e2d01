"""Generation: read, append, rotate, pages, padding; and every byte of the cache afterwards."""

from __future__ import annotations

import pytest
import torch
from cache_cases import NAN, CacheCase, expected, make_cache, run_cached
from cases import BF16, FP16, FP32
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, standard_attention
from torch import Tensor

from flash_attn import flash_attn_with_kvcache


def check_cache(name: str, cache: Tensor, after: Tensor, before: Tensor, touched: Tensor) -> None:
    """New rows hold what they should (rotation may round otherwise); all others their old bits."""
    assert_bitwise(f"{name}, old rows", cache[~touched], before[~touched])
    torch.testing.assert_close(
        cache[touched], after[touched], msg=lambda text: f"{name}, new rows: {text}"
    )
    margins = cache._base.clone()
    margins[tuple(slice(o, -o) for o in (1, 1, 1, 8))] = 7.0
    assert (margins == 7.0).all(), f"{name}: wrote outside the cache"


def check(case: CacheCase, device, **more) -> None:
    x = make_cache(case, device)
    before = x.clone()
    ref = expected(case, before, attention_ref)
    std = expected(case, before, standard_attention)
    out, lse = run_cached(case, x, **more)
    assert_accurate("out", out, ref.out, std.out)
    assert_lse("lse", lse, ref.lse)
    check_cache("k_cache", x.k_cache, ref.k_cache, before.k_cache, ref.touched)
    check_cache("v_cache", x.v_cache, ref.v_cache, before.v_cache, ref.touched)


CASES = [
    CacheCase("read"),
    CacheCase("read_all_keys_not_causal", causal=False, dtype=FP16),
    CacheCase("read_chunk", sq=7, cache_seqlens=(37, 128, 7)),
    CacheCase("read_chunk_longer_than_cache", sq=9, cache_seqlens=(4, 128, 0)),
    CacheCase("read_mqa", h=6, hk=1, d=128),
    CacheCase("read_mha", h=3, hk=3, d=40),
    CacheCase("read_d_256", d=256),
    CacheCase("read_d_v", d=192, dv=128),
    CacheCase("append_d_v", d=40, dv=72, new=3, sq=3),
    CacheCase("append_one", new=1),
    CacheCase("append_chunk", new=5, sq=5),
    CacheCase("append_fewer_than_queries", new=2, sq=5),
    CacheCase("append_more_than_queries", new=6, sq=2),
    CacheCase("append_to_empty", new=4, sq=4, cache_seqlens=(0, 0, 0)),
    CacheCase("append_to_the_last_row", new=2, sq=2, cache_seqlens=(148, 0, 1)),
    CacheCase("append_not_causal", new=3, sq=3, causal=False),
    CacheCase("append_fp32", new=3, sq=3, dtype=FP32, rotary_dim=64),
    CacheCase("append_window", new=3, sq=3, window=(20, 0), causal=False),
    CacheCase("append_softcap_alibi_sinks", new=2, sq=2, softcap=5.0, alibi="bh", sinks=True),
    CacheCase("read_alibi", alibi="h", sq=4),
    CacheCase("read_sinks", sinks=True, cache_seqlens=(0, 20, 150)),
    CacheCase("read_softcap", softcap=2.0, scale=0.4),
    CacheCase("rotary_interleaved", new=1, rotary_dim=64),
    CacheCase("rotary_halves", new=1, rotary_dim=64, interleaved=False),
    CacheCase("rotary_partial", new=3, sq=3, rotary_dim=32),
    CacheCase("rotary_partial_halves", new=3, sq=3, rotary_dim=16, interleaved=False),
    CacheCase("rotary_not_causal_turns_q_once", new=3, sq=3, rotary_dim=64, causal=False),
    CacheCase("rotary_window", new=3, sq=3, rotary_dim=64, causal=False, window=(50, 0)),
    CacheCase("rotary_more_queries", new=2, sq=4, rotary_dim=64, interleaved=False),
    CacheCase("batch_idx", batch_idx=True),
    CacheCase("batch_idx_append_rotary", batch_idx=True, new=2, sq=2, rotary_dim=64),
    CacheCase("leftpad", leftpad=(0, 100, 2)),
    CacheCase("leftpad_everything", leftpad=(37, 128, 3)),
    CacheCase("leftpad_append", leftpad=(30, 5, 0), new=2, sq=2),
    CacheCase("leftpad_rotary", leftpad=(30, 5, 0), new=2, sq=2, rotary_dim=64),
    CacheCase("leftpad_batch_idx", leftpad=(30, 5, 0), batch_idx=True, sq=3),
    CacheCase("absent_sequences", cache_seqlens=(-1, 20, -1)),
    CacheCase("absent_sequences_append", cache_seqlens=(-1, 20, -1), new=2, sq=2, rotary_dim=64),
    CacheCase("many_tiles", b=1, cache_size=1100, cache_seqlens=(1025,), new=3, sq=3, d=128),
    *(
        CacheCase(f"pages_of_{n}", page_size=n, sq=2, cache_seqlens=(37, 128, n))
        for n in (1, 16, 64, 100, 256)
    ),
    *(
        CacheCase(f"pages_of_{n}_append", page_size=n, new=5, sq=5, rotary_dim=64)
        for n in (1, 3, 16, 100)
    ),
    CacheCase("pages_append_across", page_size=16, new=20, sq=20, cache_seqlens=(15, 0, 31)),
    CacheCase("pages_absent", page_size=16, new=2, sq=2, cache_seqlens=(-1, 20, -1)),
    # Rows that are no multiples of 16 bytes: read where they lie by few queries, copied for many.
    CacheCase("odd_rows", d=60, dv=44, sq=2),
    CacheCase("odd_rows_append", d=60, dv=60, new=3, sq=3, rotary_dim=32, interleaved=False),
    CacheCase("odd_rows_of_v", d=64, dv=99, new=2, batch_idx=True, leftpad=(30, 5, 0)),
    CacheCase("odd_rows_chunk", d=100, dv=36, new=40, sq=40, cache_seqlens=(37, 100, 3)),
    CacheCase("odd_rows_options", d=33, sq=4, softcap=2.0, alibi="h", sinks=True, window=(20, 0)),
    CacheCase("odd_rows_in_pages", d=250, page_size=16, new=2, sq=2, h=8, rotary_dim=64),
    CacheCase("pages_window_fp16", page_size=16, window=(9, -1), dtype=FP16, sq=3),
    CacheCase("pages_leftpad", page_size=16, leftpad=(30, 5, 0), new=2, sq=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_call(case, device, needs):
    with needs(*case.features):
        check(case, device)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("page_size", [0, 16])
def test_num_splits(page_size, num_splits, device, needs):
    case = CacheCase(
        "splits", page_size=page_size, cache_size=600, cache_seqlens=(1, 520, 33), new=2, sq=2
    )
    with needs(*case.features):
        check(case, device, num_splits=num_splits)


def test_cache_seqlens_int_or_tensor(device, needs):
    case = CacheCase("lengths", cache_seqlens=(40, 40, 40), new=2, sq=2)
    with needs("kvcache"):
        first, second = make_cache(case, device), make_cache(case, device)
        expected_out, _ = run_cached(case, first)
        out, _ = run_cached(case, second, cache_seqlens=40)
        assert_bitwise("out", out, expected_out)
        assert_bitwise("k_cache", second.k_cache, first.k_cache)


def test_without_cache_seqlens_the_whole_cache_counts(device, needs):
    case = CacheCase("whole", cache_size=70, cache_seqlens=(70, 70, 70))
    with needs("kvcache"):
        check(case, device, cache_seqlens=None)


def test_output_alone_is_returned_by_default(device, needs):
    case = CacheCase("plain")
    x = make_cache(case, device)
    with needs("kvcache"):
        out = flash_attn_with_kvcache(x.q, x.k_cache, x.v_cache, cache_seqlens=1)
        assert out.shape == x.q.shape
        assert out.dtype == case.dtype


def test_keys_and_values_as_slices_of_one_cache(device, needs):
    case = CacheCase("packed", new=2, sq=2, rotary_dim=64)
    x = make_cache(case, device)
    before = x.clone()
    both = torch.stack([x.k_cache, x.v_cache], dim=2)  # (b, rows, 2, hk, d)
    x.k_cache, x.v_cache = both.unbind(2)
    with needs(*case.features):
        ref, std = (expected(case, before, f) for f in (attention_ref, standard_attention))
        out, _ = run_cached(case, x)
        assert_accurate("out", out, ref.out, std.out)
        torch.testing.assert_close(both[:, :, 0], ref.k_cache, equal_nan=True)
        assert_bitwise("v", both[:, :, 1], ref.v_cache)


def test_step_by_step_equals_one_causal_pass(device, needs):
    """Prefill, then one token at a time: the same outputs as attention over the whole text."""
    b, s, h, hk, d = 2, 24, 4, 2, 32
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(b, s, n, d, generator=gen).to(BF16).to(device) for n in (h, hk, hk))
    k_cache = torch.full((b, s, hk, d), NAN, dtype=BF16, device=device)
    v_cache = k_cache.clone()
    with needs("kvcache"):
        outs, done = [], 0
        for step in [10, *[1] * (s - 10)]:
            rows = slice(done, done + step)
            outs.append(
                flash_attn_with_kvcache(
                    q[:, rows], k_cache, v_cache, k[:, rows], v[:, rows], cache_seqlens=done,
                    causal=True,
                )
            )  # fmt: skip
            done += step
        ref, _, _ = attention_ref(q, k, v, causal=True)
        std, _, _ = standard_attention(q, k, v, causal=True)
        assert_accurate("out", torch.cat(outs, dim=1), ref, std)
        assert_bitwise("k_cache", k_cache, k)
        assert_bitwise("v_cache", v_cache, v)


def test_a_missing_page_is_neither_read_nor_written(device, needs):
    """Page -1 inside the length, as padding of a captured graph leaves it: no harm anywhere."""
    case = CacheCase("missing", page_size=16, new=2, sq=2, cache_seqlens=(14, 20, 3))
    x = make_cache(case, device)
    before = x.clone()
    table = x.extra["block_table"].clone()
    pages = table[0][table[0] >= 0].long()
    table[0] = -1  # sequence 0 has no pages although it has a length
    with needs(*case.features):
        ref, std = (expected(case, before, f) for f in (attention_ref, standard_attention))
        out, lse = run_cached(case, x, block_table=table)
        assert not out[0].any()
        assert torch.isneginf(lse[0]).all()  # no key was there, not even one of score 0
        assert_accurate("out", out[1:], ref.out[1:], std.out[1:])
        touched = ref.touched.clone()
        touched[pages] = False
        check_cache("k_cache", x.k_cache, ref.k_cache, before.k_cache, touched)
        check_cache("v_cache", x.v_cache, ref.v_cache, before.v_cache, touched)


@pytest.mark.parametrize("tables", [torch.float32, torch.float16])
def test_rotary_tables_of_another_dtype(device, needs, tables):
    """As if they had been given in q's."""
    like = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(2, 1, 2, 32, **like) for _ in "qkv")
    cos, sin = (torch.randn(16, 16, device=device, dtype=tables) for _ in "cs")
    results = []
    with needs("kvcache"):
        for dtype in (tables, torch.bfloat16):
            caches = [torch.zeros(2, 16, 2, 32, **like) for _ in "kv"]
            out = flash_attn_with_kvcache(
                q, *caches, k, v, cos.to(dtype), sin.to(dtype), cache_seqlens=3, causal=True
            )
            results.append((out, *caches))
        for ours, theirs in zip(*results):
            assert_bitwise("result", ours, theirs)
