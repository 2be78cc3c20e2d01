"""The decode kernel itself writes what a call brings to the cache: every thread block what it
reads, and one of them the rest. Blocks run one after the other here, in either order: whichever
relies on another's rows reads NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import CacheCase, expected, make_cache
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, standard_attention
from test_kvcache import check_cache
from torch import Tensor
from torch.nn.functional import pad

from . import calls
from .rows import DTYPES, TABLE, id_of
from .test_append_kernels import append

# Rows whose warps share keys leave new keys to a launch before.
ROWS = [v for v in TABLE if (v.direction, v.cached_bits, v.wide) == ("decode", 16, False)]
SMALL = [v for v in ROWS if v.head_dim == 64 and v.scores == "plain" and v.dtype == "bf16"]
SMALL_FULL = [v for v in ROWS if v.head_dim == 64 and v.scores == "full" and v.dtype == "bf16"]
APPEND = {v.dtype: v for v in TABLE if v.direction == "append"}


def whole_chunks(x: Tensor) -> Tensor:
    """With columns up to a multiple of 8, as the ops are given q and new rows."""
    return pad(x, (0, -x.shape[-1] % 8))


def run(
    kernels, row, case: CacheCase, x, num_splits: int, last_block_first: bool = False,
    turned: Tensor | None = None, **more,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """turned: x's queries, where another launch turned them and wrote x's rows."""
    extra = {"rotary_cos": None, "rotary_sin": None} | x.extra
    tables = extra.pop("rotary_cos"), extra.pop("rotary_sin")
    local = case.causal or case.window != (-1, -1)
    q, k, v = (whole_chunks(t) for t in (x.q, x.k, x.v))
    brings = None
    if turned is None:
        brings = calls.new_rows(None, k, v, *tables, case.interleaved, local)
    out, lse = calls.cached(
        kernels, row.name, q if turned is None else turned, x.k_cache, x.v_cache, new=case.new,
        causal=case.causal, window_size=case.window, softmax_scale=case.d**-0.5,
        cache_seqlens=torch.tensor(case.cache_seqlens, dtype=torch.int32), num_splits=num_splits,
        last_block_first=last_block_first, brings=brings, **extra, **more,
    )  # fmt: skip
    return out[..., : x.v.shape[-1]], lse


def check(
    kernels, row, case: CacheCase, num_splits: int, last_block_first: bool = False, **more
) -> None:
    case = replace(case, dtype=DTYPES[row.dtype], d=min(case.d, row.head_dim))
    x = make_cache(case, "cpu")
    before = x.clone()
    ref, standard = (expected(case, before, f) for f in (attention_ref, standard_attention))
    out, lse = run(kernels, row, case, x, num_splits, last_block_first, **more)
    assert_accurate("out", out, ref.out, standard.out)
    assert_lse("lse", lse, ref.lse)
    check_cache("k_cache", x.k_cache, ref.k_cache, before.k_cache, ref.touched)
    check_cache("v_cache", x.v_cache, ref.v_cache, before.v_cache, ref.touched)


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize(
    "case",
    [
        CacheCase("one", new=1, cache_seqlens=(37, 309, 0), cache_size=310, d=256, rotary_dim=64),
        CacheCase("halves", new=3, sq=3, h=8, hk=2, cache_seqlens=(126, 299, 63), cache_size=310,
                  d=256, rotary_dim=64, interleaved=False),
    ],
    ids=id_of,
)  # fmt: skip
@pytest.mark.parametrize("num_splits", [1, 100])
def test_every_row_of_the_table(kernels, row, case, num_splits):
    check(kernels, row, case, num_splits)


LONG = dict(cache_seqlens=(700, -1, 63), cache_size=710)
CASES = [
    CacheCase("no_rotary", new=2, sq=2, **LONG),
    # Into two units, which are two pieces.
    CacheCase("across_pieces", new=5, sq=5, cache_seqlens=(125, 62, 318), cache_size=330),
    CacheCase("several_row_blocks", new=4, sq=4, h=16, hk=2, rotary_dim=64, **LONG),
    CacheCase("more_than_queries", new=7, sq=2, rotary_dim=64, **LONG),
    CacheCase("fewer_than_queries", new=2, sq=6, rotary_dim=64, **LONG),
    # No query reads all of them.
    CacheCase("behind_a_window", new=7, window=(2, 0), causal=False, rotary_dim=64, **LONG),
    CacheCase("to_empty", new=2, sq=6, cache_seqlens=(0, 1, 0), rotary_dim=64),
    CacheCase("not_causal", new=3, sq=3, causal=False, rotary_dim=64, **LONG),
    CacheCase("to_the_last_row", new=2, sq=2, cache_seqlens=(148, 0, 1), rotary_dim=32),
    CacheCase("few_pairs", new=3, rotary_dim=24, **LONG),
    CacheCase("few_pairs_in_halves", new=3, rotary_dim=24, interleaved=False, **LONG),
    CacheCase("all_of_d", new=3, d=64, rotary_dim=64, interleaved=False, **LONG),
    CacheCase("many_rows", new=2, sq=2, h=14, hk=1, rotary_dim=64, **LONG),
    CacheCase("small", new=2, d=8, rotary_dim=8, interleaved=False, **LONG),
    CacheCase("d_v", new=2, d=64, dv=40, rotary_dim=64, **LONG),
    CacheCase("batch_idx", new=2, batch_idx=True, rotary_dim=64, **LONG),
    CacheCase("leftpad", new=2, sq=2, leftpad=(30, 0, 64), rotary_dim=64, **LONG),
    *(CacheCase(f"pages_of_{n}", page_size=n, new=8, sq=2, cache_seqlens=(700, -1, 60),
                cache_size=710, rotary_dim=64) for n in (1, 3, 16)),
]  # fmt: skip


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("case", CASES, ids=id_of)
@pytest.mark.parametrize("num_splits", [0, 1, 100])
@pytest.mark.parametrize("last_block_first", [False, True])
def test_calls(kernels, row, case, num_splits, last_block_first):
    check(kernels, row, case, num_splits, last_block_first)


def check_bits(kernels, row, case: CacheCase, x) -> None:
    """As if the new rows had had a launch of their own."""
    apart = x.clone()
    turned = append(kernels, APPEND[row.dtype], case, apart)
    results = run(kernels, row, case, x, 100)
    for name, ours, theirs in zip(
        ("out", "lse", "k_cache", "v_cache"),
        (*results, x.k_cache, x.v_cache),
        (*run(kernels, row, case, apart, 100, turned=turned), apart.k_cache, apart.v_cache),
        strict=True,
    ):
        assert_bitwise(name, ours, theirs)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize(
    "case",
    [
        CacheCase("interleaved", new=4, sq=4, h=16, hk=2, rotary_dim=64, **LONG),
        CacheCase("halves", new=4, sq=4, h=16, hk=2, rotary_dim=64, interleaved=False, **LONG),
        CacheCase("few_pairs", new=3, sq=2, rotary_dim=24, interleaved=False, **LONG),
        CacheCase("at_one_angle", new=3, sq=3, causal=False, rotary_dim=40, **LONG),
        CacheCase("pages", new=8, sq=8, page_size=16, rotary_dim=64, cache_seqlens=(700, -1, 60)),
    ],
    ids=id_of,
)
def test_bits(kernels, row, case):
    check_bits(kernels, row, case, make_cache(case, "cpu"))


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_positions_beyond_an_int(kernels, row):
    """Several queries behind the largest length turn by the last position that there is."""
    case = CacheCase("full", new=1, sq=5, cache_seqlens=(150, 150, 150), rotary_dim=64)
    x = make_cache(case, "cpu")
    beyond = (2**31 - 3, 2**31 - 1, 150)
    check_bits(kernels, row, replace(case, cache_seqlens=beyond), x)


@pytest.mark.parametrize("row", SMALL_FULL, ids=id_of)
@pytest.mark.parametrize(
    "case",
    [
        CacheCase("halves", d=60, dv=44, new=3, sq=3, rotary_dim=32, interleaved=False, **LONG),
        CacheCase("any_bytes", d=33, dv=51, new=2, sq=2, rotary_dim=32, **LONG),
        CacheCase("pages", d=50, page_size=16, new=8, sq=2, cache_seqlens=(700, -1, 60)),
    ],
    ids=id_of,
)
def test_rows_that_are_no_chunks(kernels, row, case):
    check(kernels, row, case, 100)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize(
    "case",
    [
        CacheCase("many", new=9),
        CacheCase("pairs_that_are_no_fours", new=1, rotary_dim=20),
    ],
    ids=id_of,
)
def test_others_have_a_launch_of_their_own(kernels, row, case):
    x = make_cache(case, "cpu")
    with pytest.raises(ValueError, match="a launch of their own"):
        run(kernels, row, case, x, 1)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("lengths", [(149, 150, 2**31 - 1), (-(2**31), 150, 149)])
def test_what_has_no_place_is_not_written(kernels, row, lengths):
    case = CacheCase("full", new=2, rotary_dim=64)
    x = make_cache(case, "cpu")
    before = x.clone()
    run(kernels, row, replace(case, cache_seqlens=lengths), x, 100)
    touched = torch.tensor([[n == 149 and i == 149 for i in range(150)] for n in lengths])
    assert torch.equal(x.v_cache[touched], x.v[torch.tensor(lengths) == 149, 0])
    check_cache("k_cache", x.k_cache, x.k_cache, before.k_cache, touched)
    check_cache("v_cache", x.v_cache, x.v_cache, before.v_cache, touched)
