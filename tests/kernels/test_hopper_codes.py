"""Hopper's forward against a cache of 8-bit codes (e4m3): chunks of prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import CacheCase
from compare import assert_accurate

from . import calls
from .rows import DTYPES, TABLE, id_of
from .test_decode_codes import check, every_code
from .test_key_splits import KeySplits

ROWS = [v for v in TABLE if (v.direction, v.cached_bits) == ("fwd", 8) and v.dtype in DTYPES]
PLAIN = [v for v in ROWS if v.scores == "plain"]


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize(
    "case",
    [
        CacheCase("dense", cache_seqlens=(300, 70, 1), cache_size=310),
        CacheCase("absent_and_empty", cache_seqlens=(-1, 0, 70)),
        CacheCase("batch_idx", batch_idx=True, cache_seqlens=(300, 170, 1), causal=False),
        CacheCase("pages_of_8", page_size=8, cache_seqlens=(300, 70, 1)),
        CacheCase("pages_of_24", page_size=24, window=(60, 0), cache_seqlens=(300, 72, 7)),
        CacheCase("pages_of_64", page_size=64, causal=False, cache_seqlens=(256, -1, 9)),
        CacheCase("pages_of_256", page_size=256, cache_seqlens=(520, 256, 33)),
        CacheCase("larger_tiles", page_size=32, h=1, hk=1, sq=270, cache_seqlens=(300, 290, 0)),
        CacheCase("smaller_head_dim", d=48, cache_seqlens=(300, 70, 1)),
        CacheCase("head_dims", d=32, dv=64, page_size=16, cache_seqlens=(300, 70, 1)),
    ],
    ids=id_of,
)
@pytest.mark.parametrize("kind", ["all", "head"])
def test_chunks(kernels, row, case, kind):
    if row.scores == "full":
        case = replace(case, softcap=20.0, alibi="bh", sinks=True)
    sizes = {"d": row.head_dim} if case.d == CacheCase("").d else {}
    rows = {"h": 4, "hk": 2, "sq": 70} if case.sq == CacheCase("").sq else {}
    case = replace(case, cache_size=max(case.cache_seqlens))
    check(kernels, row, replace(case, **sizes, **rows), kind, num_splits=None)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page_size", [0, 16])
def test_pack_gqa(kernels, row, splits, page_size):
    on_tile = calls.OnTile(kernels, "packed") if splits == 1 else KeySplits(kernels, splits)
    case = CacheCase("tiles", h=6, hk=2, sq=50, d=row.head_dim, page_size=page_size,
                     cache_seqlens=(700, 41, 300), cache_size=700)  # fmt: skip
    check(on_tile, row, case, num_splits=None)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize("of", ["keys", "values"])
@pytest.mark.parametrize("nan", [False, True])
def test_every_code(kernels, row, of, nan):
    """In every column."""
    dtype, d = DTYPES[row.dtype], row.head_dim
    cache = every_code(d, nan)
    small = torch.ones_like(cache)
    k, v = (cache, small) if of == "keys" else (small, cache)
    gen = torch.Generator().manual_seed(1)
    q = torch.randn((1, 16, 1, d), generator=gen).to(dtype)
    keys, values = (t[0, :, 0].double() * 2**-6 for t in (k, v))
    ref = (q[0, :, 0].double() @ keys.T * d**-0.5).softmax(-1) @ values
    out, _ = calls.cached(
        kernels, row.name, q, k, v, num_splits=None, codes=calls.code_descales(2**-6, 2**-6),
        cache_seqlens=torch.tensor([256], dtype=torch.int32),
    )  # fmt: skip
    assert torch.equal(out[0, :, 0].isnan(), ref.isnan())
    seen = ~ref.isnan()
    assert_accurate("out", out[0, :, 0][seen], ref[seen], ref.to(dtype)[seen])
