"""Decoding against a cache of 8-bit codes (e4m3) with scales: every row of the table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from cache_cases import CacheCase, CacheInputs, expected, make_cache
from cases import BF16, poisoned
from compare import assert_accurate, assert_lse
from reference import attention_ref, standard_attention
from torch import Tensor

from . import calls
from .rows import TABLE
from .test_decode_kernels import DTYPES, HEADS, LENGTHS, PAGES, SCORE_MODS, VISIBLE, id_of, run

ROWS = [v for v in TABLE if (v.direction, v.cached_bits) == ("decode", 8)]
APPEND = {v.dtype: v for v in TABLE if v.direction == "append"}
SMALL = [v for v in ROWS if v.head_dim == 64 and v.scores == "plain"]
FULL = [v for v in ROWS if v.scores == "full"]
E4M3 = torch.float8_e4m3fn
SCALES = ("all", "head", "row")


def codes_of(x: Tensor, scale: Tensor | float) -> Tensor:
    """The nearest codes of x / scale (float32), saturating."""
    return (x.float() / torch.as_tensor(scale).float()).clamp(-448, 448).to(E4M3)


@dataclass
class Codes:
    """A cache of codes, its scales as a call takes them and spread over the rows, and its numbers
    in float32."""

    codes: Tensor  # (pages or batch, rows, hk, d)
    scale: Tensor | float
    of_rows: Tensor  # (pages or batch, rows, hk, 1)

    @property
    def numbers(self) -> Tensor:
        return self.codes.float() * self.of_rows


def coded(cache: Tensor, kind: str, case: CacheCase, x: CacheInputs, gen) -> Codes:
    first, rows, heads, _ = cache.shape
    of_rows = torch.full((first, rows, heads, 1), 0.013)
    scale: Tensor | float = 0.013
    if kind == "row":
        scale = poisoned(torch.rand((first, rows, heads), generator=gen) * 0.02 + 0.002)
        of_rows = scale[..., None]
    elif kind == "head":
        scale = torch.rand((heads, case.b), generator=gen).T * 0.02 + 0.002
        for b in range(case.b):
            if case.page_size:
                pages = x.extra["block_table"][b]
                of_rows[pages[pages >= 0].long()] = scale[b, :, None]
            else:
                index = x.extra.get("cache_batch_idx")
                of_rows[b if index is None else int(index[b])] = scale[b, :, None]
    return Codes(poisoned(codes_of(cache, of_rows), around=16, fill=7.0), scale, of_rows)


def make(row, case: CacheCase, kind: str):
    case = replace(case, dtype=DTYPES[row.dtype], d=min(case.d, row.head_dim))
    x = make_cache(case, "cpu")
    gen = torch.Generator().manual_seed(3)
    k, v = (coded(cache, kind, case, x, gen) for cache in (x.k_cache, x.v_cache))
    return case, x, k, v


def check(kernels, row, case: CacheCase, kind: str = "head", **more) -> None:
    case, x, k, v = make(row, case, kind)
    codes = replace(x, k_cache=k.codes, v_cache=v.codes)
    numbers = replace(x, k_cache=k.numbers, v_cache=v.numbers)
    in_16_bits = replace(
        x, **{f"{n}_cache": c.numbers.to(case.dtype) for n, c in (("k", k), ("v", v))}
    )
    ref = expected(case, numbers, attention_ref)
    standard = expected(case, in_16_bits, standard_attention)
    scales = calls.code_descales(k.scale, v.scale)
    out, lse = run(kernels, row, case, codes, codes=scales, **more)
    assert_accurate("out", out, ref.out, standard.out)
    assert_lse("lse", lse, ref.lse)


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@LENGTHS
@pytest.mark.parametrize("kind", SCALES)
def test_lengths(kernels, row, case, kind):
    check(kernels, row, case, kind, num_splits=3)


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize("kind", SCALES)
def test_clusters(kernels, row, kind):
    if row.scores == "plain" and row.warps >= 4:
        case = CacheCase("cluster", cache_seqlens=(1000, 310, 3), cache_size=1000, d=256)
        check(kernels, row, case, kind, cluster=4, hopper_sms=12)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("page_size", [0, 1, 16, 100])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("num_splits", [0, 100])
def test_pages(kernels, row, page_size, kind, num_splits):
    check(kernels, row, replace(PAGES, page_size=page_size), kind, num_splits=num_splits)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("sq", [1, 16, 70])
@HEADS
def test_packed_heads(kernels, row, h, hk, sq):
    """Any number of rows, which no other kernel takes."""
    case = CacheCase("heads", b=2, h=h, hk=hk, sq=sq, cache_seqlens=(160, 41), cache_size=160)
    check(kernels, row, case, num_splits=2)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("case", VISIBLE, ids=id_of)
@pytest.mark.parametrize("kind", SCALES)
def test_visible_keys(kernels, row, case, kind):
    check(kernels, row, case, kind, num_splits=4)


ODD_ROWS = [
    CacheCase("odd_rows", d=40, cache_size=310),
    CacheCase("odd_rows_of_d_v", d=24, dv=56, cache_size=310),
]


@pytest.mark.parametrize("row", FULL, ids=id_of)
@pytest.mark.parametrize("case", SCORE_MODS + ODD_ROWS, ids=id_of)
@pytest.mark.parametrize("kind", SCALES)
def test_score_mods_and_odd_rows(kernels, row, case, kind):
    check(kernels, row, case, kind, num_splits=2)


def every_code(d: int, nan: bool) -> Tensor:
    """(1, 256, 1, d): 256 keys, turned by a code a column; NaN at 127 and 255, or 3."""
    turn = (torch.arange(256)[:, None] + torch.arange(d)) % 256
    codes = turn.to(torch.uint8).view(E4M3)
    return (codes if nan else codes.float().nan_to_num(3.0).to(E4M3))[None, :, None]


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("nan", [False, True])
def test_every_code(kernels, row, nan):
    """As keys and as values, in every column of a sixteen."""
    dtype, d = DTYPES[row.dtype], row.head_dim
    cache = every_code(d, nan)
    gen = torch.Generator().manual_seed(1)
    q = torch.randn((1, 16, 1, d), generator=gen).to(dtype)
    small = torch.ones_like(cache)
    for k, v in ((cache, small), (small, cache), (cache, cache)):
        numbers = [t.double() * 2**-6 for t in (k, v)]
        scores = q.double()[0, :, 0] @ numbers[0][0, :, 0].T * d**-0.5
        ref = scores.softmax(-1) @ numbers[1][0, :, 0]
        out, _ = calls.cached(
            kernels, row.name, q, k, v, codes=calls.code_descales(2**-6, 2**-6),
            cache_seqlens=torch.tensor([256], dtype=torch.int32),
        )  # fmt: skip
        assert torch.equal(out[0, :, 0].isnan(), ref.isnan())
        bound = 2**-8 * ref.nan_to_num().abs().max()
        assert (out[0, :, 0].double() - ref).nan_to_num().abs().max() <= bound


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_a_nan_stays_in_its_column(kernels, row):
    dtype, d = DTYPES[row.dtype], row.head_dim
    for key in range(0, 40, 3):
        gen = torch.Generator().manual_seed(key)
        k = torch.randn((1, 70, 1, d), generator=gen).to(E4M3)
        v = torch.randn((1, 70, 1, d), generator=gen).to(E4M3)
        column = key * 7 % d
        v.view(torch.uint8)[0, key, 0, column] = 0xFF if key % 2 else 0x7F
        q = torch.randn((1, 3, 2, d), generator=gen).to(dtype)
        out, _ = calls.cached(
            kernels, row.name, q, k, v, codes=calls.code_descales(1.0, 1.0),
            cache_seqlens=torch.tensor([70], dtype=torch.int32),
        )  # fmt: skip
        expected_nan = torch.zeros_like(out, dtype=bool)
        expected_nan[..., column] = True
        assert torch.equal(out.isnan(), expected_nan)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_a_nan_of_a_key_that_is_not_seen(kernels, row):
    """Goes to the rows that see the key, and to no other."""
    dtype, d = DTYPES[row.dtype], row.head_dim
    gen = torch.Generator().manual_seed(9)
    k, v = (torch.randn((1, 70, 1, d), generator=gen).to(E4M3) for _ in range(2))
    q = torch.randn((1, 5, 2, d), generator=gen).to(dtype)
    k.view(torch.uint8)[0, 67, 0, 9] = 0x7F
    out, lse = calls.cached(
        kernels, row.name, q, k, v, codes=calls.code_descales(1.0, 1.0), causal=True,
        cache_seqlens=torch.tensor([70], dtype=torch.int32),
    )  # fmt: skip
    assert out[0].isnan().any(-1).any(-1).tolist() == [False, False, True, True, True]
    assert lse[0, 0].isnan().tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_large_and_small_queries(kernels, row):
    """Rows of any size beside each other: each has a factor of its own in fp16."""
    dtype, d = DTYPES[row.dtype], row.head_dim
    gen = torch.Generator().manual_seed(5)
    sizes = [1e30, 1e-30, 1.0, 3e4, 0.0, 1e-6] if dtype == BF16 else [9e3, 1e-4, 1.0, 9.0, 0.0]
    q = torch.randn((1, len(sizes), 1, d), generator=gen)
    q = (q * torch.tensor(sizes)[:, None, None]).to(dtype)
    k, v = (torch.randn((1, 90, 1, d), generator=gen).to(E4M3) for _ in range(2))
    out, lse = calls.cached(
        kernels, row.name, q, k, v, codes=calls.code_descales(1.0, 1.0),
        cache_seqlens=torch.tensor([90], dtype=torch.int32),
    )  # fmt: skip
    scores = q.double()[0, :, 0] @ k.double()[0, :, 0].T * d**-0.5
    ref = scores.softmax(-1) @ v.double()[0, :, 0]
    assert (out[0, :, 0].double() - ref).abs().max() < 0.02
    torch.testing.assert_close(lse[0, 0].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize(
    "case",
    [
        CacheCase("one", new=1, cache_seqlens=(37, 309, 0), cache_size=310, d=256, rotary_dim=64),
        CacheCase("halves", new=3, sq=3, h=8, hk=2, cache_seqlens=(126, 299, 63), cache_size=310,
                  d=256, rotary_dim=64, interleaved=False, page_size=16),
        CacheCase("many", new=30, cache_seqlens=(126, -1, 63), cache_size=310, d=256),
        CacheCase("odd_rows", new=2, d=24, dv=40, cache_seqlens=(126, -1, 63), cache_size=310),
    ],
    ids=id_of,
)  # fmt: skip
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("by", ["decode", "append"])
def test_new_rows(kernels, row, case, kind, by):
    """New rows are turned, rounded to q's dtype, and then coded, in the launch that reads them or
    in one before."""
    if by == "decode" and case.new > 8:
        return
    if row.scores == "plain" and case.d % 16:
        return
    case, x, k, v = make(row, case, kind)
    new = replace(x, k=x.k * 3, v=x.v * 900)  # some values saturate
    full = (torch.full_like(c.numbers, float("nan")) for c in (k, v))
    turned = expected(case, replace(new, k_cache=next(full), v_cache=next(full)), attention_ref)
    wanted_k, wanted_v = k.codes.clone(), v.codes.clone()
    at = turned.touched
    wanted_k[at] = codes_of(turned.k_cache, k.of_rows)[at]
    wanted_v[at] = codes_of(turned.v_cache, v.of_rows)[at]
    tables = {name: x.extra.pop(name, None) for name in ("rotary_cos", "rotary_sin")}
    scales = calls.code_descales(k.scale, v.scale)
    lengths = torch.tensor(case.cache_seqlens, dtype=torch.int32)
    if by == "append":
        calls.append(
            kernels, APPEND[row.dtype].name, x.q, k.codes, v.codes, new.k, new.v,
            cache_seqlens=lengths, interleaved=case.interleaved, codes=scales, **tables, **x.extra,
        )  # fmt: skip
    else:
        brings = calls.new_rows(None, new.k, new.v, *tables.values(), case.interleaved, True)
        out, lse = calls.cached(
            kernels, row.name, x.q, k.codes, v.codes, new=case.new, causal=True, brings=brings,
            cache_seqlens=lengths, codes=scales, num_splits=4, **x.extra,
        )  # fmt: skip
        numbers = replace(
            x, k=None, v=None, k_cache=wanted_k.float() * k.of_rows,
            v_cache=wanted_v.float() * v.of_rows, extra=x.extra,
        )  # fmt: skip
        after = replace(
            case, cache_seqlens=tuple(n + case.new if n >= 0 else n for n in case.cache_seqlens)
        )
        q = turned_queries(case, x.q, tables)
        ref = expected(after, replace(numbers, q=q), attention_ref)
        standard = expected(after, replace(numbers, q=q), standard_attention)
        assert_accurate("out", out, ref.out, standard.out)
        assert_lse("lse", lse, ref.lse)
    for got, wanted in ((k.codes, wanted_k), (v.codes, wanted_v)):
        both_nan = got.float().isnan() & wanted.float().isnan()
        assert torch.equal(got.view(torch.uint8)[~both_nan], wanted.view(torch.uint8)[~both_nan])


def turned_queries(case: CacheCase, q: Tensor, tables: dict) -> Tensor:
    from reference_cache import rotate

    if tables["rotary_cos"] is None:
        return q
    turned = [
        rotate(
            q[b], tables["rotary_cos"], tables["rotary_sin"],
            torch.arange(case.sq) + max(case.cache_seqlens[b], 0), case.interleaved,
        ).to(q.dtype)
        for b in range(case.b)
    ]  # fmt: skip
    return torch.stack(turned)
