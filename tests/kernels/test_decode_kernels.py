"""Few query rows against a cache: every row of the table, whatever the keys are cut into."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import NAN, CacheCase, expected, make_cache
from compare import assert_accurate, assert_lse
from reference import attention_ref, standard_attention

from . import calls
from .rows import DTYPES, TABLE, id_of

ROWS = [v for v in TABLE if (v.direction, v.cached_bits) == ("decode", 16)]
FULL = [v for v in ROWS if v.scores == "full"]
# What does not depend on the row.
SMALL = [v for v in ROWS if v.head_dim == 64 and v.scores == "plain" and v.dtype == "bf16"]

# What rows see of their keys, by the name of a case.
WINDOWS = {
    "left": dict(causal=False, window=(70, -1)),
    "both": dict(causal=False, window=(300, 5)),
    "right": dict(causal=False, window=(-1, 0)),
    "behind": dict(window=(0, -1)),
    "everything": dict(causal=False),
}


# What a cache of codes runs as well (test_decode_codes.py).
LENGTHS = pytest.mark.parametrize(
    "case",
    [
        CacheCase("one_query", cache_seqlens=(37, 310, 3), cache_size=310, d=256),
        CacheCase("absent_and_empty", cache_seqlens=(-1, 0, 70), sq=2, h=2, hk=2, d=256),
        CacheCase("chunk", sq=5, h=8, hk=2, cache_seqlens=(5, 310, 150), cache_size=310, d=256),
        CacheCase("pages", page_size=3, h=3, hk=1, cache_seqlens=(200, 1, -1), d=256),
    ],
    ids=id_of,
)
PAGES = CacheCase("pages", h=4, hk=2, sq=2, cache_seqlens=(700, -1, 33), cache_size=700)
HEADS = pytest.mark.parametrize(("h", "hk"), [(2, 2), (8, 2), (7, 1), (16, 2), (20, 1)])
VISIBLE = [
    replace(case, sq=3, cache_seqlens=(390, 520, 40), cache_size=520)
    for case in (
        *(CacheCase(name, **mask) for name, mask in WINDOWS.items()),
        CacheCase("pages", page_size=16, window=(200, -1)),
        CacheCase("leftpad", leftpad=(30, 500, 7)),
        CacheCase("leftpad_all", leftpad=(390, 520, 0), page_size=100),
        CacheCase("leftpad_window", leftpad=(30, 500, 7), window=(100, -1)),
        CacheCase("batch_idx", batch_idx=True, leftpad=(3, 0, 1)),
    )
]
SCORE_MODS = [
    replace(case, sq=3, h=8, hk=2, cache_size=300, d=256)
    for case in (
        CacheCase("softcap", softcap=3.0, cache_seqlens=(40, 300, 129)),
        CacheCase("alibi", alibi="h", cache_seqlens=(40, 300, 129)),
        CacheCase("sinks", sinks=True, cache_seqlens=(0, 300, -1)),
        CacheCase("all", softcap=20.0, alibi="bh", sinks=True, window=(150, -1), page_size=16,
                  cache_seqlens=(40, 300, 129)),
        CacheCase("negative_scale", scale=-0.2, cache_seqlens=(40, 300, 129)),
        CacheCase("no_scale", scale=0.0, cache_seqlens=(40, 300, 129)),
    )
]  # fmt: skip


def run(kernels, row, case: CacheCase, x, **more):
    tensors = {"alibi_slopes": None, "s_aux": None} | x.extra | more
    lengths = torch.tensor(case.cache_seqlens, dtype=torch.int32)
    return calls.cached(
        kernels, row.name, x.q, x.k_cache, x.v_cache, cache_seqlens=lengths, causal=case.causal,
        window_size=case.window, softmax_scale=case.scale, softcap=case.softcap, **tensors,
    )  # fmt: skip


def check(kernels, row, case: CacheCase, **more) -> None:
    case = replace(case, dtype=DTYPES[row.dtype], d=min(case.d, row.head_dim))
    x = make_cache(case, "cpu")
    ref, standard = (expected(case, x, f) for f in (attention_ref, standard_attention))
    out, lse = run(kernels, row, case, x, **more)
    assert_accurate("out", out, ref.out, standard.out)
    assert_lse("lse", lse, ref.lse)


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@LENGTHS
@pytest.mark.parametrize("num_splits", [0, 3])
def test_lengths(kernels, row, case, num_splits):
    check(kernels, row, case, num_splits=num_splits)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("page_size", [0, 1, 3, 16, 64, 100, 256])
@pytest.mark.parametrize("num_splits", [0, 1, 100])
def test_pages(kernels, row, page_size, num_splits):
    check(kernels, row, replace(PAGES, page_size=page_size), num_splits=num_splits)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@HEADS
@pytest.mark.parametrize("sq", [1, 2, 16])
def test_packed_heads(kernels, row, h, hk, sq):
    case = CacheCase("heads", b=2, h=h, hk=hk, sq=sq, cache_seqlens=(160, 41), cache_size=160)
    check(kernels, row, case, num_splits=2)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("case", VISIBLE, ids=id_of)
@pytest.mark.parametrize("num_splits", [0, 4])
def test_visible_keys(kernels, row, case, num_splits):
    check(kernels, row, case, num_splits=num_splits)


@pytest.mark.parametrize("row", FULL, ids=id_of)
@pytest.mark.parametrize("case", SCORE_MODS, ids=id_of)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_score_mods(kernels, row, case, num_splits):
    check(kernels, row, case, num_splits=num_splits)


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_smaller_head_dims_are_zero_filled(kernels, row):
    case = CacheCase("small", d=row.head_dim - 24, dv=row.head_dim - 40, cache_seqlens=(70, 9, 150))
    check(kernels, row, case, num_splits=2)


@pytest.mark.parametrize("row", [v for v in FULL if not v.wide], ids=id_of)
@pytest.mark.parametrize("missing", [4, 2, 3])  # columns: rows are multiples of 8, 4 or 2 bytes
@pytest.mark.parametrize("first", [0, 4, 2, 1])  # element, from a multiple of 16 bytes on
def test_rows_of_any_bytes(kernels, row, missing, first):
    """They come by the largest words that all of them are multiples of."""
    columns, keys = row.head_dim - missing, 70
    gen = torch.Generator().manual_seed(columns)
    q = torch.zeros(2, 2, 4, row.head_dim, dtype=DTYPES[row.dtype])
    q[..., :columns].normal_(generator=gen)
    caches = []
    for _ in "kv":
        memory = torch.full((3 * keys * 2 * row.head_dim + 8,), NAN, dtype=q.dtype)
        strides = keys * 2 * row.head_dim, 2 * row.head_dim, columns, 1
        cache = memory.as_strided((3, keys, 2, columns), strides, first)
        caches.append(cache.normal_(generator=gen))
    order = torch.tensor([2, 0], dtype=torch.int32)
    out, lse = calls.cached(
        kernels, row.name, q, *caches, cache_batch_idx=order, num_splits=2, softmax_scale=0.1
    )
    x = q[..., :columns], *(cache[order.long()] for cache in caches)
    ref, ref_lse, _ = attention_ref(*x, softmax_scale=0.1)
    standard, _, _ = standard_attention(*x, softmax_scale=0.1)
    assert_accurate("out", out[..., :columns], ref, standard)
    assert_lse("lse", lse, ref_lse)
    assert not out[..., columns:].any()


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_missing_page_has_no_keys(kernels, row, num_splits):
    """Also a page beyond the cache, and a table that is shorter than the length says."""
    case = CacheCase("missing", dtype=DTYPES[row.dtype], page_size=16, b=2, sq=2, causal=False,
                     cache_seqlens=(310, 150))  # fmt: skip
    x = make_cache(case, "cpu")
    table = x.extra["block_table"] = x.extra["block_table"].clone()
    missing = torch.zeros(310, dtype=torch.bool)
    for entry, page in ((0, -1), (3, 10_000), (7, -5), (19, -1)):
        table[0, entry] = page
        missing[16 * entry : 16 * (entry + 1)] = True
    table[1] = -1
    out, lse = run(kernels, row, case, x, num_splits=num_splits)
    assert not out[1].any()
    assert torch.isneginf(lse[1]).all()
    kept = (~missing).nonzero().flatten()
    pages, rows = table[0, kept // 16].long(), kept % 16
    k, v = (cache[pages, rows][None] for cache in (x.k_cache, x.v_cache))
    ref, ref_lse, _ = attention_ref(x.q[:1], k, v)
    standard, _, _ = standard_attention(x.q[:1], k, v)
    assert_accurate("out", out[:1], ref, standard)
    assert_lse("lse", lse[:1], ref_lse)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_a_batch_index_outside_the_cache_has_no_keys(kernels, row):
    case = CacheCase("outside", dtype=DTYPES[row.dtype], batch_idx=True)
    x = make_cache(case, "cpu")
    x.extra["cache_batch_idx"] = torch.tensor([-1, 2, 6], dtype=torch.int32)
    out, lse = run(kernels, row, case, x)
    assert not out[[0, 2]].any()
    assert torch.isneginf(lse[[0, 2]]).all()


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_many_sequences(kernels, row):
    """More than a warp searches at once, most of them short, one of them long."""
    lengths = [(7 * b) % 50 for b in range(70)]
    lengths[40], lengths[69], lengths[3] = 900, 333, -1
    case = CacheCase("many", b=70, h=2, hk=2, cache_seqlens=tuple(lengths), cache_size=900)
    check(kernels, row, case, num_splits=9)


# Each tile meets all of them, its two dtypes by turns.
MERGED = [(1, 1), (3, 1), (2, 2), (5, 1), (4, 2), (16, 1), (6, 3)]


@pytest.mark.parametrize(
    ("row", "h", "sq"),
    [
        pytest.param(row, h, sq, id=f"{h}-{sq}-{row.name}")
        for i, row in enumerate(ROWS)
        for j, (h, sq) in enumerate(MERGED)
        if (i + j) % 2 == 0
    ],
)
def test_merging(kernels, row, h, sq):
    """Few rows and many, of 23 pieces: 16 rows of 20 are what is merged in a round.

    The CTA that is last merges in the same order, and counters are 0 again for the next launch.
    """
    keys = 23 * row.block_n * row.warps - 5
    case = CacheCase("merging", b=2, h=h, hk=1, sq=sq, cache_seqlens=(keys, 100), cache_size=keys,
                     d=row.head_dim, dtype=DTYPES[row.dtype], window=(keys - 9, -1),
                     sinks=row.scores == "full")  # fmt: skip
    x = make_cache(case, "cpu")
    ref, standard = (expected(case, x, f) for f in (attention_ref, standard_attention))
    first, *others = (
        run(kernels, row, case, x, num_splits=100, last_block_first=last_block_first)
        for last_block_first in (False, True, True, False)
    )
    assert_accurate("out", first[0], ref.out, standard.out)
    assert_lse("lse", first[1], ref.lse)
    for out, lse in others:
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_equal_lengths(kernels, row):
    """No tensor says how long sequences are."""
    case = CacheCase("equal", dtype=DTYPES[row.dtype], b=3, h=4, hk=2, sq=2,
                     cache_seqlens=(700, 700, 700), cache_size=700)  # fmt: skip
    x = make_cache(case, "cpu")
    told = run(kernels, row, case, x)
    out, lse = calls.cached(kernels, row.name, x.q, x.k_cache, x.v_cache, causal=case.causal)
    assert torch.equal(out, told[0])
    assert torch.equal(lse, told[1])


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_counters(kernels, row):
    """A range for each stream, as large as its calls need, and left at 0."""
    few = CacheCase("few", b=2, h=2, hk=1, cache_seqlens=(300, 150), cache_size=300)
    many = replace(few, b=120, h=32, hk=32, cache_seqlens=(300,) + 119 * (1,))
    for stream in (0, 1, 2):
        check(kernels, row, few, num_splits=3, stream=stream)
    check(kernels, row, many, num_splits=2)
    for stream in (0, 1):
        check(kernels, row, few, num_splits=3, stream=stream)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_counters_of_very_many_pieces(kernels, row):
    """More than 8,192 are in the workspace, which holds NaN before the launch clears them."""
    kernels.own_counters()
    for b, own in ((128, 0), (129, 129 * 2 * 32)):
        lengths = (300,) + (b - 1) * (1,)
        case = CacheCase("many", b=b, h=32, hk=32, cache_seqlens=lengths, cache_size=300)
        check(kernels, row, case, num_splits=2)
        assert kernels.own_counters() == own


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_large_logits_and_nan(kernels, row, num_splits):
    """The first maxima are far below 0, and a NaN in the keys stays in its sequence."""
    case = CacheCase("large", dtype=DTYPES[row.dtype], b=2, d=row.head_dim, cache_seqlens=(150, 90))
    x = make_cache(case, "cpu")
    x.q[0] *= 30
    x.k_cache[0, :150, 0] = x.k_cache[0, :150, 0].abs() * x.q[0, 0, 0].sign() * -1
    x.k_cache[1, 20] = NAN
    ref, standard = (expected(case, x, f) for f in (attention_ref, standard_attention))
    out, lse = run(kernels, row, case, x, num_splits=num_splits)
    assert_accurate("out", out[:1], ref.out[:1], standard.out[:1])
    assert_lse("lse", lse[:1], ref.lse[:1])
    assert out[1].isnan().all()
    assert lse[1].isnan().all()


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_shared_memory_banks(kernels, row):
    """No two lanes of an access want different words of one bank."""
    case = CacheCase("banks", b=1, d=row.head_dim, cache_seqlens=(150,))
    kernels.bank_counts()
    check(kernels, row, case, num_splits=1)
    counts = kernels.bank_counts()
    assert {"ldmatrix", "cp.async"} <= set(counts)
    assert not any(conflicts for _, conflicts in counts.values()), counts
