"""New keys into a cache, turned or not, and queries turned: every byte around them stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import CacheCase, expected, make_cache
from cases import poisoned
from compare import assert_accurate, assert_lse
from reference import attention_ref, standard_attention
from reference_cache import rotate
from test_kvcache import check_cache

from . import calls
from .rows import DTYPES, TABLE, id_of

ROWS = [v for v in TABLE if v.direction == "append"]
ATTENTION = [
    v for v in TABLE
    if v.head_dim == 64 and v.scores == "plain" and v.dtype == "bf16"
    and v.direction in ("fwd", "paged", "decode") and v.cached_bits == 16
]  # fmt: skip


def append(kernels, row, case: CacheCase, x) -> torch.Tensor:
    lengths = torch.tensor(case.cache_seqlens, dtype=torch.int32)
    names = ("rotary_cos", "rotary_sin", "cache_batch_idx", "block_table")
    return calls.append(
        kernels, row.name, x.q, x.k_cache, x.v_cache, x.k, x.v, cache_seqlens=lengths,
        interleaved=case.interleaved, local=case.causal or case.window != (-1, -1),
        **{name: x.extra[name] for name in names if name in x.extra},
    )  # fmt: skip


def turned_queries(case: CacheCase, x) -> torch.Tensor:
    local = int(case.causal or case.window != (-1, -1))
    rows = []
    for q, length in zip(x.q, case.cache_seqlens, strict=True):
        at = torch.arange(case.sq) * local + max(length, 0)
        tables = x.extra["rotary_cos"], x.extra["rotary_sin"]
        rows.append(rotate(q, *tables, at, case.interleaved).to(q.dtype))
    return torch.stack(rows)


CASES = [
    CacheCase("plain", new=3, sq=2),
    CacheCase("d_v", new=2, d=256, dv=40),
    CacheCase("small", new=2, d=8, rotary_dim=8, interleaved=False),
    CacheCase("interleaved", new=3, sq=3, d=128, rotary_dim=128),
    CacheCase("halves", new=3, sq=5, d=256, rotary_dim=256, interleaved=False),
    CacheCase("part", new=3, rotary_dim=32),
    CacheCase("part_halves", new=3, rotary_dim=32, interleaved=False),
    # Pairs and 16-byte chunks do not fit together.
    CacheCase("odd", new=3, rotary_dim=20),
    CacheCase("odd_halves", new=3, rotary_dim=20, interleaved=False),
    CacheCase("two", new=3, rotary_dim=2, interleaved=False),
    CacheCase("not_local", new=3, sq=3, rotary_dim=64, causal=False),
    CacheCase("window", new=3, sq=3, rotary_dim=64, causal=False, window=(5, -1)),
    CacheCase("absent", new=3, cache_seqlens=(-1, 20, -1), rotary_dim=16),
    CacheCase("batch_idx", new=2, batch_idx=True, rotary_dim=64),
    *(CacheCase(f"pages_of_{n}", page_size=n, new=7, sq=2, rotary_dim=64) for n in (1, 3, 16)),
]


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_append(kernels, row, case):
    case = replace(case, dtype=DTYPES[row.dtype])
    x = make_cache(case, "cpu")
    before = x.clone()
    ref = expected(case, before, attention_ref)
    q = append(kernels, row, case, x)
    check_cache("k_cache", x.k_cache, ref.k_cache, before.k_cache, ref.touched)
    check_cache("v_cache", x.v_cache, ref.v_cache, before.v_cache, ref.touched)
    if case.rotary_dim:
        torch.testing.assert_close(q, turned_queries(case, x))


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_unaligned_tables(kernels, row):
    """Tables at any address, with any distance between positions."""
    for interleaved in (True, False):
        case = CacheCase("tables", DTYPES[row.dtype], new=2, rotary_dim=64, interleaved=interleaved)
        x = make_cache(case, "cpu")
        for name in ("rotary_cos", "rotary_sin"):
            x.extra[name] = poisoned(x.extra[name], around=3)
        before = x.clone()
        ref = expected(case, before, attention_ref)
        append(kernels, row, case, x)
        check_cache("k_cache", x.k_cache, ref.k_cache, before.k_cache, ref.touched)


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_what_has_no_place_is_not_written(kernels, row):
    """A length beyond the cache, an entry or a page that does not exist."""
    case = CacheCase("full", DTYPES[row.dtype], new=2)
    x = make_cache(case, "cpu")
    before = x.clone()
    append(kernels, row, replace(case, cache_seqlens=(149, 150, 2**31 - 1)), x)
    touched = torch.zeros(3, 150, dtype=torch.bool)
    touched[0, 149] = True  # as many as fit
    assert torch.equal(x.k_cache[touched], x.k[:1, 0])
    check_cache("k_cache", x.k_cache, x.k_cache, before.k_cache, touched)

    x = before.clone()
    x.extra["cache_batch_idx"] = torch.tensor([-1, 3, 1], dtype=torch.int32)
    append(kernels, row, replace(case, cache_seqlens=(5, 5, 5)), x)
    touched[:] = False
    touched[1, 5:7] = True
    check_cache("v_cache", x.v_cache, x.v_cache, before.v_cache, touched)
    assert torch.equal(x.v_cache[touched], x.v[2])

    case = replace(case, page_size=16)
    x = make_cache(case, "cpu")
    before = x.clone()
    x.extra["block_table"] = torch.full_like(x.extra["block_table"], -1)
    x.extra["block_table"][0, :] = 10_000
    append(kernels, row, case, x)
    check_cache(
        "k_cache", x.k_cache, x.k_cache, before.k_cache, torch.zeros(x.k_cache.shape[:2]) > 0
    )


@pytest.mark.parametrize("attention", ATTENTION, ids=id_of)
@pytest.mark.parametrize("new", [1, 4])
def test_then_attend(kernels, attention, new):
    """All of flash_attn_with_kvcache."""
    case = CacheCase("both", new=new, sq=2, rotary_dim=64, cache_seqlens=(37, 128, -1))
    if attention.direction != "fwd":
        case = replace(case, page_size=16)
    x = make_cache(case, "cpu")
    ref, std = (expected(case, x, f) for f in (attention_ref, standard_attention))
    q = append(kernels, ROWS[0], case, x)
    out, lse = calls.cached(
        kernels, attention.name, q, x.k_cache, x.v_cache, new=new, causal=True,
        cache_seqlens=torch.tensor(case.cache_seqlens, dtype=torch.int32),
        block_table=x.extra.get("block_table"),
        num_splits=3 if attention.direction == "decode" else None,
    )  # fmt: skip
    assert not x.v_cache[ref.touched].isnan().any()
    assert_accurate("out", out, ref.out, std.out)
    assert_lse("lse", lse, ref.lse)
