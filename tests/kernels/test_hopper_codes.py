"""Hopper's forward of 8-bit codes (e4m3): chunks of prompts against a cache of them, and queries,
keys and values that all are codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import CacheCase
from cases import BF16, FP16
from compare import assert_accurate, assert_lse
from reference import attention_ref, standard_attention

from . import calls
from .rows import DTYPES, TABLE
from .test_decode_codes import E4M3, check
from .test_key_splits import Cut

ALL_ROWS = [v for v in TABLE if (v.direction, v.cached_bits) == ("fwd", 8)]
ROWS = [v for v in ALL_ROWS if v.dtype != "e4m3"]
PLAIN = [v for v in ROWS if v.scores == "plain"]
CODES = [v for v in ALL_ROWS if v.dtype == "e4m3"]
PLAIN_CODES = [v for v in CODES if v.scores == "plain"]


def id_of(x) -> str:
    return getattr(x, "name", str(x))


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
    on_tile = calls.OnTile(kernels, "packed") if splits == 1 else Cut(kernels, splits)
    case = CacheCase("tiles", h=6, hk=2, sq=50, d=row.head_dim, page_size=page_size,
                     cache_seqlens=(700, 41, 300), cache_size=700)  # fmt: skip
    check(on_tile, row, case, num_splits=None)


ALL = torch.arange(256, dtype=torch.uint8).view(E4M3)  # NaN at 127 and 255


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize("of", ["keys", "values"])
@pytest.mark.parametrize("nan", [False, True])
def test_every_code(kernels, row, of, nan):
    """In every column: 256 keys, turned by a code a column."""
    dtype, d = DTYPES[row.dtype], row.head_dim
    turn = (torch.arange(256)[:, None] + torch.arange(d)) % 256
    codes = ALL[turn].float()
    if not nan:
        codes = codes.nan_to_num(3.0)
    cache = codes.to(E4M3)[None, :, None]  # (1, 256, 1, d)
    small = torch.ones_like(cache)
    k, v = (cache, small) if of == "keys" else (small, cache)
    gen = torch.Generator().manual_seed(1)
    q = torch.randn((1, 16, 1, d), generator=gen).to(dtype)
    keys, values = (t[0, :, 0].double() * 2**-6 for t in (k, v))
    ref = (q[0, :, 0].double() @ keys.T * d**-0.5).softmax(-1) @ values
    out, _ = calls.cached(
        kernels, row.name, q, k, v, num_splits=None, codes=calls.code_scales(2**-6, 2**-6),
        cache_seqlens=torch.tensor([256], dtype=torch.int32),
    )  # fmt: skip
    assert torch.equal(out[0, :, 0].isnan(), ref.isnan())
    seen = ~ref.isnan()
    assert_accurate("out", out[0, :, 0][seen], ref[seen], ref.to(dtype)[seen])


def check_codes(kernels, row, sq, sk, *, d, dv=None, h=4, hk=2, out_dtype=BF16, **options) -> None:
    """Against float64 attention of the codes' numbers, beside bf16's own error."""
    gen = torch.Generator().manual_seed(sq + sk)
    sizes = ((sq, h, d), (sk, hk, d), (sk, hk, dv or d))
    q, k, v = (torch.randn(2, *size, generator=gen).to(E4M3) for size in sizes)
    scales = [torch.rand(2, hk, generator=gen) + 0.5 for _ in "qkv"]
    spread = lambda x, n: x.repeat_interleave(n, 1)[:, None, :, None]  # noqa: E731
    numbers = [q.float() * spread(scales[0], h // hk), *(
        x.float() * spread(scale, 1) for x, scale in zip((k, v), scales[1:])
    )]  # fmt: skip
    out, lse = calls.dense(
        kernels, row.name, q, k, v, codes=calls.code_scales(scales[1], scales[2], scales[0]),
        out_dtype=out_dtype, **options,
    )  # fmt: skip
    expected, expected_lse, _ = attention_ref(*numbers, **options)
    standard, *_ = standard_attention(*(x.to(BF16) for x in numbers), **options)
    assert_accurate("out", out, expected, standard)
    assert_lse("lse", lse, expected_lse)


@pytest.mark.parametrize("row", CODES, ids=id_of)
@pytest.mark.parametrize(("sq", "sk"), [(1, 77), (130, 300), (200, 129), (64, 0)])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (60, 20)}],
    ids=["full", "causal", "window"],
)
def test_all_codes(kernels, row, sq, sk, options):
    if row.scores == "full":
        options = options | {"softcap": 20.0}
    check_codes(kernels, row, sq, sk, d=row.head_dim, **options)


@pytest.mark.parametrize("row", PLAIN_CODES, ids=id_of)
@pytest.mark.parametrize("out_dtype", [BF16, FP16])
def test_head_dims_and_dtype_of_out(kernels, row, out_dtype):
    d = row.head_dim
    check_codes(kernels, row, 70, 200, d=d - 32, dv=d - 16, out_dtype=out_dtype, causal=True)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1))
    check_codes(kernels, row, 70, 200, d=d, h=6, hk=1, out_dtype=out_dtype, s_aux=sinks)


@pytest.mark.parametrize("row", PLAIN_CODES, ids=id_of)
@pytest.mark.parametrize("of", [0, 1, 2])
@pytest.mark.parametrize("nan", [False, True])
def test_every_code_of_a_forward(kernels, row, of, nan):
    """As queries, keys and values, in every column."""
    d = row.head_dim
    codes = ALL[(torch.arange(256)[:, None] + torch.arange(d)) % 256].float()
    codes = codes if nan else codes.nan_to_num(3.0)
    gen = torch.Generator().manual_seed(of)
    numbers = [torch.randn(256, d, generator=gen).to(E4M3).float() for _ in "qkv"]
    numbers[of] = codes
    x = [n.to(E4M3)[None, :, None] for n in numbers]
    unit = 2**-6
    q, k, v = (n.double() * unit for n in numbers)
    ref = (q @ k.T * d**-0.5).softmax(-1) @ v
    out, _ = calls.dense(
        kernels, row.name, *x, codes=calls.code_scales(unit, unit, unit), out_dtype=BF16,
    )  # fmt: skip
    assert torch.equal(out[0, :, 0].isnan(), ref.isnan())
    seen = ~ref.isnan()
    assert_accurate("out", out[0, :, 0][seen], ref[seen], ref.to(BF16)[seen])
