"""The forward kernel against a cache: many query rows, keys in pages or in entries of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import CacheCase, expected, make_cache
from compare import assert_accurate, assert_lse
from reference import attention_ref, standard_attention

from . import calls
from .rows import DTYPES, FORWARDS, TABLE, id_of
from .test_hopper_forward import check_packed

ROWS = [v for v in TABLE if v.direction == "paged"]
PLAIN = [v for v in ROWS if v.scores == "plain"]
FORWARD = [v for v in FORWARDS if v.scores == "plain"]
# Hopper's forward serves pages of a multiple of 8 rows itself, without left padding.
HOPPER = [v for v in FORWARDS if v.arch == "sm90"]
# Some of them have longer tiles, in boxes of their own, where a table has room for many keys: they
# are too long for a kernel of any keys (params/forward_tile.h).
LONG = [row for row in HOPPER if row.second_block_n > 128]
MANY_KEYS = 7200


def str_of(x) -> str:
    return str(getattr(x, "name", x))


def with_room(table: torch.Tensor, page_size: int) -> torch.Tensor:
    """For many keys; none is listed there."""
    more = max(0, -(-MANY_KEYS // page_size) - table.shape[1])
    return torch.nn.functional.pad(table, (0, more), value=-1)


def check(kernels, row, case: CacheCase, has_room: bool = False) -> torch.Tensor:
    case = replace(case, dtype=DTYPES[row.dtype], d=row.head_dim, dv=row.head_dim_v)
    x = make_cache(case, "cpu")
    if has_room:
        x.extra["block_table"] = with_room(x.extra["block_table"], case.page_size)
        # Pages of K and V by turns, eights of rows apart.
        x.k_cache, x.v_cache = torch.stack([x.k_cache, x.v_cache], dim=1).unbind(1)
    ref, standard = (expected(case, x, f) for f in (attention_ref, standard_attention))
    out, lse = calls.cached(
        kernels, row.name, x.q, x.k_cache, x.v_cache, num_splits=None,
        cache_seqlens=torch.tensor(case.cache_seqlens, dtype=torch.int32),
        causal=case.causal, window_size=case.window, softcap=case.softcap,
        **{"alibi_slopes": None, "s_aux": None} | x.extra,
    )  # fmt: skip
    assert_accurate("out", out, ref.out, standard.out)
    assert_lse("lse", lse, ref.lse)
    return lse


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize(
    "case",
    [
        CacheCase("pages_of_16", page_size=16, cache_seqlens=(300, 70, 1)),
        CacheCase("pages_of_1", page_size=1, causal=False, cache_seqlens=(40, -1, 0)),
        CacheCase("pages_of_100", page_size=100, window=(60, 0), cache_seqlens=(300, 70, 1)),
        CacheCase("leftpad", page_size=3, leftpad=(130, 5, 0), cache_seqlens=(300, 71, 1)),
    ],
    ids=id_of,
)
def test_pages(kernels, row, case):
    if row.scores == "full":
        case = replace(case, softcap=20.0, alibi="bh", sinks=True)
    check(kernels, row, replace(case, h=2, hk=1, sq=70))


@pytest.mark.parametrize("row", HOPPER, ids=id_of)
@pytest.mark.parametrize(
    "case",
    [
        CacheCase("pages_of_8", page_size=8, cache_seqlens=(300, 70, 1)),
        CacheCase("pages_of_16", page_size=16, causal=False, cache_seqlens=(140, -1, 0)),
        CacheCase("pages_of_24", page_size=24, window=(60, 0), cache_seqlens=(300, 72, 7)),
        CacheCase("pages_of_64", page_size=64, causal=False, cache_seqlens=(256, 257, 9)),
        CacheCase("pages_of_112", page_size=112, window=(150, 20), cache_seqlens=(300, 112, 70)),
        CacheCase("pages_of_256", page_size=256, cache_seqlens=(520, 256, 33)),
        CacheCase("heads_share", page_size=16, hk=1, h=8, sq=21, cache_seqlens=(300, 170, 1)),
        CacheCase("larger_tiles", page_size=32, hk=1, h=1, sq=270, cache_seqlens=(300, 290, 0)),
    ],
    ids=id_of,
)
def test_pages_on_hopper(kernels, row, case):
    if row.scores == "full":
        case = replace(case, softcap=20.0, alibi="bh", sinks=True)
    check(kernels, row, case if case.sq > 1 else replace(case, h=2, hk=1, sq=70))


@pytest.mark.parametrize("row", LONG, ids=id_of)
@pytest.mark.parametrize(
    "case",
    [
        CacheCase("pages_of_8", page_size=8, cache_seqlens=(400, 171, 1)),
        CacheCase("pages_of_16", page_size=16, causal=False, cache_seqlens=(360, -1, 177)),
        CacheCase("pages_of_24", page_size=24, cache_seqlens=(300, 183, 7)),
        CacheCase("pages_of_48", page_size=48, causal=False, cache_seqlens=(352, 353, 9)),
        CacheCase("pages_of_64", page_size=64, cache_seqlens=(352, 337, 15)),
        CacheCase("pages_of_72", page_size=72, causal=False, cache_seqlens=(300, 257, 9)),
        CacheCase("pages_of_80", page_size=80, causal=False, cache_seqlens=(415, -1, 177)),
        CacheCase("pages_of_128", page_size=128, cache_seqlens=(513, 383, 0)),
        CacheCase("pages_of_176", page_size=176, cache_seqlens=(340, 256, 33), sinks=True),
        CacheCase("pages_of_256", page_size=256, causal=False, cache_seqlens=(529, 256, 7)),
        CacheCase("many", b=1, page_size=16, window=(3550, 0), cache_seqlens=(3801,)),
        CacheCase("many_large", b=1, page_size=64, window=(3550, 0), cache_seqlens=(3801,)),
        CacheCase("share", b=2, page_size=144, h=6, sq=256, cache_seqlens=(500, 160)),
    ],
    ids=id_of,
)
def test_long_tiles_of_pages(kernels, row, case):
    # With few queries, heads that share keys would share row blocks.
    case = case if case.sq > 1 else replace(case, h=2, hk=2, sq=130)
    lse = check(calls.OnTile(kernels, "second"), row, case, has_room=True)
    if case.window[0] < 0:
        usual = check(calls.OnTile(kernels, "first"), row, case)
        assert not torch.equal(lse, usual)  # sums of other tiles


@pytest.mark.parametrize("row", LONG, ids=id_of)
def test_pages_that_are_no_eights_apart(kernels, row):
    """Nothing but the usual tiles, whatever room there is."""
    case = CacheCase("apart", page_size=16, cache_seqlens=(300, 183, 7), h=2, hk=2, sq=130,
                     d=128, dtype=DTYPES[row.dtype])  # fmt: skip
    x = make_cache(case, "cpu")
    assert x.k_cache.stride(0) % (8 * x.k_cache.stride(1)) != 0
    table = x.extra.pop("block_table")
    lengths = torch.tensor(case.cache_seqlens, dtype=torch.int32)
    first, second = (
        calls.cached(kernels, row.name, x.q, x.k_cache, x.v_cache, num_splits=None, causal=True,
                     cache_seqlens=lengths, block_table=t)
        for t in (table, with_room(table, 16))
    )  # fmt: skip
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("row", FORWARD, ids=id_of)
def test_entries_of_a_cache(kernels, row):
    check(kernels, row, CacheCase("entries", sq=70, h=2, hk=1, batch_idx=True, leftpad=(30, 0, 2)))


@pytest.mark.parametrize(
    ("row", "size", "has_room"),
    [
        *((row, 16, False) for row in [*PLAIN, *HOPPER]),
        *((row, size, True) for row in LONG for size in (16, 64, 80, 256)),
    ],
    ids=str_of,
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_missing_page_has_no_keys(kernels, row, size, has_room, causal):
    """In the interior, where no limit asks for mask code; and masks count the missing keys."""
    n, sq = 500 if size == 16 else 13 * size - 12, 40
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, sq, 1, row.head_dim, generator=gen).to(DTYPES[row.dtype])
    k, v = (
        torch.randn(1, n, 1, d, generator=gen).to(q.dtype) for d in (row.head_dim, row.head_dim_v)
    )
    pages = -(-n // size)
    table = torch.arange(pages, dtype=torch.int32)[None]
    missing = torch.zeros(n, dtype=torch.bool)
    for entry, page in ((0, -1), (9, 10_000), (10, -3)):
        table[0, entry] = page
        missing[entry * size : (entry + 1) * size] = True
    caches = []
    for x in (k, v):
        cache = torch.full((pages, size, 1, x.shape[-1]), float("nan"), dtype=q.dtype)
        cache.view(-1, 1, x.shape[-1])[:n][~missing] = x[0, ~missing]
        caches.append(cache)
    if has_room:
        table, kernels = with_room(table, size), calls.OnTile(kernels, "second")
    out, lse = calls.cached(
        kernels, row.name, q, *caches, num_splits=None, block_table=table, causal=causal,
        cache_seqlens=torch.tensor([n], dtype=torch.int32),
    )  # fmt: skip
    seen = ~missing[None].expand(sq, n)
    if causal:
        seen = seen & (torch.arange(n) <= torch.arange(sq)[:, None] + n - sq)
    scores = (q[0, :, 0].double() @ k[0, :, 0].double().T) * row.head_dim**-0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    expected_out = (scores.softmax(-1) @ v[0, :, 0].double())[None, :, None]
    torch.testing.assert_close(out.double(), expected_out, atol=4e-3, rtol=1e-2)
    assert_lse("lse", lse, scores.logsumexp(-1)[None, None])


@pytest.mark.parametrize(
    ("row", "size", "has_room"),
    [
        *((row, 7, False) for row in PLAIN),
        *((row, 8, False) for row in HOPPER),
        *((row, size, True) for row in LONG for size in (16, 64, 96)),
    ],
    ids=str_of,
)
@pytest.mark.parametrize("has_used", [False, True])
def test_varlen(kernels, row, size, has_room, has_used):
    """Packed queries, keys in pages, lengths by cu_seqlens_k or by seqused_k."""
    gen = torch.Generator().manual_seed(1)
    dtype = DTYPES[row.dtype]
    lengths_q, lengths_k = [0, 150, 3, 60], [10, 170, 33, 0]
    leftpad = [0] * 4 if row in HOPPER else [0, 30, 33, 0]
    heads_k = 2 if has_room else 1  # heads that share keys would share row blocks
    cu_q, cu_k = (
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for n in (lengths_q, lengths_k)
    )
    q, k, v = (
        torch.randn(n, h, d, generator=gen).to(dtype)
        for n, h, d in (
            (int(cu_q[-1]), 2, row.head_dim),
            (int(cu_k[-1]), heads_k, row.head_dim),
            (int(cu_k[-1]), heads_k, row.head_dim_v),
        )
    )
    table = torch.randperm(100, generator=gen)[: 4 * 25].view(4, 25).to(torch.int32)
    caches = []
    for x in (k, v):
        cache = torch.full((100, size, *x.shape[1:]), float("nan"), dtype=dtype)
        for b, n in enumerate(lengths_k):
            for i in range(leftpad[b], n):
                cache[int(table[b, i // size]), i % size] = x[int(cu_k[b]) + i]
        caches.append(cache)
    tensors = {}
    if any(leftpad):
        tensors["leftpad_k"] = torch.tensor(leftpad, dtype=torch.int32)
    if has_room:
        table, kernels = with_room(table, size), calls.OnTile(kernels, "second")
    if has_used:
        tensors["seqused_k"] = torch.tensor(lengths_k, dtype=torch.int32)
    result = calls.varlen(
        kernels, row.name, q, *caches, cu_q, None if has_used else cu_k, block_table=table,
        causal=True, **tensors,
    )  # fmt: skip
    check_packed(result, q, k, v, cu_q, cu_k, leftpad_k=leftpad, causal=True)
