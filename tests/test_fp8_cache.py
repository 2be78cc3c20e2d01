"""Caches of 8-bit codes: what is read of them, what an append writes, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import CacheCase, expected, run_cached
from cases import BF16, FP16, FP32, FP64
from compare import assert_accurate, assert_bitwise, assert_lse, same_nonfinite
from fp8_cases import FP8, KINDS, VALUES, CodedInputs, bits, decoded, make_codes, nearest, places
from reference import attention_ref, standard_attention
from reference_cache import gather_rows
from torch import Tensor

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward


def references(case: CacheCase, x: CodedInputs) -> list:
    """In float64, and as everybody writes it in q's dtype; of a call that has been made already.

    Of new rows they take what the cache holds now, which `check_codes` has compared.
    """
    numbers = [x.numbers(name) for name in "kv"]
    results = []
    for attention, dtype in ((attention_ref, FP64), (standard_attention, case.dtype)):
        k, v = (n.to(dtype) for n in numbers)
        before = replace(x.plain, k_cache=k, v_cache=v)
        stored = lambda at, k=k, v=v: (k[at], v[at])  # noqa: E731
        results.append(expected(case, before, attention, stored=stored))
    return results


def check_codes(case: CacheCase, x: CodedInputs, before: CodedInputs, touched: Tensor) -> None:
    """New rows hold the codes of what a cache in 16 bits would; all others their old codes."""
    plain = x.plain.clone()
    run_cached(case, plain)
    for name in "kv":
        ours, old = (getattr(y.coded, f"{name}_cache") for y in (x, before))
        assert_bitwise(f"{name}, old rows", bits(ours[~touched]), bits(old[~touched]))
        rows, descale = getattr(plain, f"{name}_cache")[touched], x.per_row[name][touched]
        new = nearest(rows.float().cpu() / descale.cpu()[..., None])
        assert_bitwise(f"{name}, new rows", bits(ours[touched]), bits(new))
        margins = ours._base.clone()
        margins[tuple(slice(o, -o) for o in (1, 1, 1, 8))] = 7.0
        assert bool((margins.float() == 7.0).all()), f"{name}_cache: wrote outside the cache"


def check(case: CacheCase, kind: str, device, **more) -> None:
    x = make_codes(case, kind, device)
    before = replace(x, coded=x.coded.clone())
    out, lse = run_cached(case, x.coded, **x.descales, **more)
    ref, std = references(case, x)
    check_codes(case, x, before, ref.touched)
    assert_accurate("out", out, ref.out, std.out)
    assert_lse("lse", lse, ref.lse)


READS = [
    CacheCase("read"),
    CacheCase("read_all_keys_not_causal", causal=False, dtype=FP16),
    CacheCase("read_queries", sq=7, cache_seqlens=(37, 128, 7)),
    CacheCase("read_chunk", sq=40, cache_seqlens=(40, 128, 77)),
    CacheCase("read_mqa", h=6, hk=1, d=128, dtype=FP16),
    CacheCase("read_mha", h=3, hk=3, d=40),
    CacheCase("read_d_256", d=256),
    CacheCase("read_d_v", d=192, dv=128),
    CacheCase("read_window", window=(20, 0), causal=False, sq=3),
    CacheCase("read_softcap", softcap=2.0, scale=0.4),
    CacheCase("read_alibi", alibi="bh", sq=4),
    CacheCase("read_sinks", sinks=True, cache_seqlens=(0, 20, 150)),
    CacheCase("read_leftpad", leftpad=(0, 100, 2)),
    CacheCase("read_batch_idx", batch_idx=True, sq=2),
    CacheCase("read_absent", cache_seqlens=(-1, 20, -1)),
    CacheCase("read_many_tiles", b=1, cache_size=1100, cache_seqlens=(1025,), d=128),
    *(
        CacheCase(f"read_pages_of_{n}", page_size=n, sq=2, cache_seqlens=(37, 128, n))
        for n in (1, 3, 16, 64, 100, 256)
    ),
    CacheCase("read_pages_leftpad", page_size=16, leftpad=(30, 5, 0), sq=2),
    CacheCase("read_words_of_4", d=36, dv=68, sq=2),
    CacheCase("read_bytes", d=33, dv=81, sq=2, dtype=FP16),
]
APPENDS = [
    CacheCase("append_one", new=1),
    CacheCase("append_queries", new=5, sq=5, dtype=FP16),
    CacheCase("append_chunk", new=40, sq=40, cache_size=170),
    CacheCase("append_d_v", d=40, dv=72, new=3, sq=3),
    CacheCase("append_words_of_4", d=36, dv=68, new=3, sq=3, rotary_dim=16),
    CacheCase("append_bytes", d=33, dv=81, new=2, sq=2, rotary_dim=6),
    CacheCase("append_to_empty", new=4, sq=4, cache_seqlens=(0, 0, 0)),
    CacheCase("append_rotary", new=3, sq=3, rotary_dim=64),
    CacheCase("append_rotary_halves", new=2, sq=4, rotary_dim=32, interleaved=False),
    CacheCase("append_rotary_once", new=3, sq=3, rotary_dim=64, causal=False),
    CacheCase("append_batch_idx", batch_idx=True, new=2, sq=2, rotary_dim=64),
    CacheCase("append_leftpad", leftpad=(30, 5, 0), new=2, sq=2),
    CacheCase("append_absent", cache_seqlens=(-1, 20, -1), new=2, sq=2, rotary_dim=64),
    CacheCase("append_options", new=2, sq=2, softcap=5.0, alibi="bh", sinks=True),
    CacheCase("append_many_tiles", b=1, cache_size=1100, cache_seqlens=(1025,), new=3, sq=3),
    *(
        CacheCase(f"append_pages_of_{n}", page_size=n, new=5, sq=5, rotary_dim=64)
        for n in (1, 3, 16, 256)
    ),
    CacheCase("append_across_pages", page_size=16, new=20, sq=20, cache_seqlens=(15, 0, 31)),
]


@pytest.mark.parametrize("case", [*READS, *APPENDS], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", ["head", "row"])
def test_call(case, kind, device, needs):
    with needs(*case.features):
        check(case, kind, device)


@pytest.mark.parametrize("case", [READS[2], APPENDS[1], APPENDS[5]], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_descales(case, kind, device):
    check(case, kind, device)


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("kind", ["number", "row"])
def test_queries_of_more_bits(dtype, kind, device, needs):
    case = CacheCase("wide", dtype=dtype, sq=3, new=3, rotary_dim=32, d=60, dv=44)
    if device == "cuda":
        case = replace(case, d=64, dv=40)
    with needs("fp32" if dtype == FP32 else "fp64"):
        check(case, kind, device)


@pytest.mark.parametrize("num_splits", [0, 1, 3, 64])
@pytest.mark.parametrize("page_size", [0, 16])
def test_num_splits(page_size, num_splits, device):
    case = CacheCase(
        "splits", page_size=page_size, cache_size=600, cache_seqlens=(1, 520, 33), new=2, sq=2
    )
    check(case, "row", device, num_splits=num_splits)


def test_different_kinds_for_keys_and_values(device):
    case = CacheCase("mixed", sq=3, page_size=16)
    x, rows = make_codes(case, "head", device), make_codes(case, "row", device)
    x.descales["v_descale"], x.per_row["v"] = rows.descales["v_descale"], rows.per_row["v"]
    out, lse = run_cached(case, x.coded, **x.descales)
    ref, std = references(case, x)
    assert_accurate("out", out, ref.out, std.out)
    assert_lse("lse", lse, ref.lse)


def test_a_descale_of_any_strides(device):
    """One of each head is expanded to all sequences; neither is copied by the caller."""
    case = CacheCase("strides", sq=2, new=2)
    x, y = (make_codes(case, "none", device) for _ in range(2))
    heads = torch.tensor([0.5, 2.0], device=device)
    out, _ = run_cached(case, x.coded, k_descale=heads.expand(3, 2), v_descale=heads.expand(3, 2))
    whole = heads.expand(3, 2).contiguous()
    same, _ = run_cached(case, y.coded, k_descale=whole, v_descale=whole)
    assert_bitwise("out", out, same)
    rows = heads.expand(*x.coded.k_cache.shape[:3])
    same, _ = run_cached(case, y.coded, k_descale=rows, v_descale=rows)
    assert_bitwise("k_cache", bits(x.coded.k_cache), bits(y.coded.k_cache))
    torch.testing.assert_close(out, same, atol=1e-2, rtol=1e-2)


# --- Every code -----------------------------------------------------------------------------------


def every_code(device, d: int) -> Tensor:
    """(256, 1, 1, d): a sequence of one key for each code."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    return codes[:, None, None, None].expand(256, 1, 1, d).contiguous().to(device)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_code_is_a_value(dtype, device):
    """Of a row with one key the output is its value, and NaN is one."""
    v = every_code(device, 64)
    k, q = torch.zeros_like(v), torch.zeros(256, 1, 2, 64, dtype=dtype, device=device)
    out = flash_attn_with_kvcache(q, k, v, v_descale=0.5)
    same = (VALUES / 2).to(dtype).to(device)[:, None, None, None].expand_as(out)
    assert_bitwise("out", out, same)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_code_is_a_key(dtype, device):
    """With one key the log-sum-exp is its score."""
    k = every_code(device, 64)
    v, q = torch.zeros_like(k), torch.zeros(256, 1, 2, 64, dtype=dtype, device=device)
    q[:, :, 0, 5], q[:, :, 1, 63] = 2.0, -0.5
    _, lse = flash_attn_with_kvcache(q, k, v, softmax_scale=0.25, k_descale=0.125, return_lse=True)
    score = VALUES.float() / 8 * 0.25
    assert_lse("lse", lse, torch.stack([score * 2, score * -0.5], 1)[..., None].to(device))


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("case", [READS[2], READS[8]], ids=lambda case: case.name)
def test_a_nan_among_the_keys(which, case, device):
    """A row that sees it is NaN, in out or in both, as with a cache in 16 bits; others are not."""
    x = make_codes(case, "none", device)
    at = (0, 34, 1, 3)  # of 37 keys
    cache = getattr(x.coded, f"{which}_cache")
    cache.view(torch.uint8)[at] = 0xFF
    plain = replace(x.plain, k_cache=x.numbers("k").to(BF16), v_cache=x.numbers("v").to(BF16))
    results = zip(("out", "lse"), run_cached(case, x.coded), run_cached(case, plain), strict=True)
    for name, ours, theirs in results:
        same_nonfinite(name, ours, theirs)
        assert ours.isnan().any() == (which == "k" or name == "out")
        assert not ours.isnan().all()


# --- Codes of new rows ----------------------------------------------------------------------------


def rounded(x: Tensor, descale: Tensor, device) -> Tensor:
    """The codes that an append makes of x (n,), with a descale of each: (n,)."""
    rows = x.to(device)[None, :, None, None].expand(1, -1, 1, 8).contiguous()
    caches = [torch.zeros(1, len(x), 1, 8, device=device).to(FP8) for _ in "kv"]
    q = torch.zeros(1, 1, 1, 8, dtype=x.dtype, device=device)
    descale = descale.to(device)[None, :, None]
    flash_attn_with_kvcache(
        q, *caches, rows, rows, cache_seqlens=0, k_descale=descale, v_descale=descale
    )
    found = [bits(cache)[0, :, 0] for cache in caches]
    assert_bitwise("columns", found[0], found[0][:, :1].expand(-1, 8))
    assert_bitwise("v", found[1], found[0])
    return found[0][:, 0]


def test_halfway_numbers_go_to_the_even_code(device):
    """And their neighbours to the nearest; all of these are numbers of fp16."""
    numbers = VALUES[:0x7F]
    halfway = ((numbers[1:] + numbers[:-1]) / 2).to(FP16)
    x = torch.cat([halfway, torch.nextafter(halfway, halfway * 2), numbers.to(FP16)])
    x = torch.cat([x, torch.nextafter(halfway, halfway * 0), torch.zeros(1, dtype=FP16)])
    x = torch.cat([x, -x])
    codes = rounded(x, torch.ones(len(x)), device)
    assert_bitwise("codes", codes, bits(nearest(x.float())))
    assert_bitwise("codes of halfway numbers", codes[:126] % 2, torch.zeros_like(codes[:126]))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_what_is_too_large_becomes_the_largest(dtype, device):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([448, 456, 464, 465, 480, 6e4, inf, nan, 2, 0.0, -0.0], dtype=dtype)
    x = torch.cat([x, -x])
    for descale in (1.0, 0.25, 3.0):
        codes = rounded(x, torch.full((len(x),), descale), device)
        assert_bitwise(f"codes for {descale}", codes, bits(nearest(x.float() / descale)))
    assert_bitwise("at 1", rounded(x[:7], torch.ones(7), device), torch.full_like(codes[:7], 0x7E))


def test_a_row_is_divided_by_its_descale(device):
    """Not multiplied by a reciprocal, which makes other codes of numbers in the middle of two."""
    middle = (VALUES[8:119] + VALUES[9:120]) / 2  # five significant bits
    descale = torch.arange(3, 64, 2)  # times six: numbers of fp16
    x = (middle[:, None] * descale / 64).flatten()
    assert torch.equal(x, x.to(FP16).double())
    x, descale = x.to(FP16), (descale / 64).expand(111, -1).flatten()
    codes = bits(nearest(x.float() / descale))
    assert (bits(nearest(x.float() * (1 / descale))) != codes).any()
    assert_bitwise("codes", rounded(x, descale, device), codes)


def test_skipped_sequences_are_neither_read_nor_written(device):
    case = CacheCase("skip", cache_seqlens=(-1, 20, -1), new=2, sq=2)
    x = make_codes(case, "row", device)
    out, lse = run_cached(case, x.coded, **x.descales)
    for b in (0, 2):
        assert not out[b].any()
        assert torch.isneginf(lse[b]).all()
        assert bool(decoded(x.coded.k_cache[b]).isnan().all())


def test_a_missing_page(device):
    """It is neither read nor written, and there are no descales for it."""
    case = CacheCase("missing", page_size=16, new=2, sq=2, cache_seqlens=(14, 20, 3))
    x = make_codes(case, "row", device)
    before = bits(x.coded.k_cache)
    table = x.coded.extra["block_table"].clone()
    pages = table[0][table[0] >= 0].long().cpu()
    table[0] = -1
    out, lse = run_cached(case, x.coded, **x.descales, block_table=table)
    ref, std = references(case, x)
    assert not out[0].any()
    assert torch.isneginf(lse[0]).all()
    assert_accurate("out", out[1:], ref.out[1:], std.out[1:])
    assert_bitwise("missing pages", bits(x.coded.k_cache)[pages], before[pages])


# --- Packed queries against pages -----------------------------------------------------------------


def packed(case: CacheCase, x: CodedInputs, lengths_q: tuple[int, ...], device) -> tuple:
    """q (total_q, h, d) and cu_seqlens_q, cu_seqlens_k of sequences that have the case's keys."""
    gen = torch.Generator().manual_seed(11)
    q = torch.randn(sum(lengths_q), case.h, case.d, generator=gen).to(case.dtype).to(device)
    lengths = (lengths_q, case.cache_seqlens)
    return q, *(torch.tensor([0, *n]).cumsum(0).int().to(device) for n in lengths)


def packed_references(case: CacheCase, x: CodedInputs, q: Tensor, lengths_q) -> list[tuple]:
    """(out (total_q, h, dv), lse (h, total_q)) in float64, and of standard attention."""
    results = []
    for attention, dtype in ((attention_ref, FP64), (standard_attention, case.dtype)):
        outs, lses = [], []
        for b, rows in enumerate(q.split(list(lengths_q))):
            found = places(case, x.plain, b)
            k, v = (gather_rows(x.numbers(name).to(dtype), found)[None] for name in "kv")
            options = {"softcap": case.softcap, "window_size": case.window}
            if "s_aux" in x.plain.extra:
                options["s_aux"] = x.plain.extra["s_aux"]
            out, lse, _ = attention(rows[None], k, v, causal=case.causal, **options)
            outs.append(out[0])
            lses.append(lse[0])
        results.append((torch.cat(outs), torch.cat(lses, dim=1)))
    return results


PACKED = [
    CacheCase("single_tokens", page_size=16),
    CacheCase("small_pages", page_size=3, causal=False, dtype=FP16),
    CacheCase("options", page_size=64, softcap=3.0, sinks=True, window=(50, -1)),
    CacheCase("values_of_another_size", page_size=16, d=192, dv=128),
]


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
@pytest.mark.parametrize("lengths_q", [(1, 1, 1), (1, 90, 3), (9, 2, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_queries(case, lengths_q, kind, device):
    x = make_codes(case, kind, device)
    q, cu_q, cu_k = packed(case, x, lengths_q, device)
    options = {"softcap": case.softcap, "window_size": case.window}
    out, lse = flash_attn_varlen_func(
        q, x.coded.k_cache, x.coded.v_cache, cu_q, cu_k, max(lengths_q), 128, causal=case.causal,
        block_table=x.plain.extra["block_table"], s_aux=x.plain.extra.get("s_aux"),
        return_lse=True, **options, **x.descales,
    )  # fmt: skip
    ref, std = packed_references(case, x, q, lengths_q)
    assert_accurate("out", out, ref[0], std[0])
    assert_lse("lse", lse, ref[1])


@pytest.mark.parametrize("kind", ["head", "row"])
def test_batch_invariance(kind, device):
    """Alone a sequence has the result that it has beside others, bit for bit."""
    case, lengths_q = CacheCase("invariant", page_size=16), (1, 20, 2)
    x = make_codes(case, kind, device)
    q, cu_q, cu_k = packed(case, x, lengths_q, device)
    table = x.plain.extra["block_table"]

    def call(q, cu_q, cu_k, table, descales):
        return flash_attn_varlen_func(
            q, x.coded.k_cache, x.coded.v_cache, cu_q, cu_k, 20, 128, causal=True,
            block_table=table, batch_invariant=True, **descales,
        )  # fmt: skip

    together = call(q, cu_q, cu_k, table, x.descales)
    for b in range(3):
        rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
        ends = (torch.tensor([0, n[b + 1] - n[b]], device=device).int() for n in (cu_q, cu_k))
        descales = x.descales
        if kind == "head":
            descales = {name: given[b : b + 1] for name, given in descales.items()}
        alone = call(q[rows], *ends, table[b : b + 1], descales)
        assert_bitwise(f"sequence {b}", alone, together[rows])


def test_lengths_and_splits_of_the_private_function(device):
    """As serving engines call it: seqused_k, left padding, a number of splits."""
    case, lengths_q = CacheCase("engine", page_size=16, leftpad=(3, 70, 1)), (1, 5, 1)
    x = make_codes(case, "row", device)
    q, cu_q, _ = packed(case, x, lengths_q, device)
    used = torch.tensor(case.cache_seqlens, dtype=torch.int32, device=device)
    out, lse, *_ = _flash_attn_varlen_forward(
        q, x.coded.k_cache, x.coded.v_cache, cu_q, None, 5, 128, 0.0, case.d**-0.5, True,
        block_table=x.plain.extra["block_table"], leftpad_k=x.plain.extra["cache_leftpad"],
        seqused_k=used, num_splits=2, **x.descales,
    )  # fmt: skip
    for b, rows in enumerate(q.split(list(lengths_q))):
        found = places(case, x.plain, b)[case.leftpad[b] :]
        wide, plain = (
            [gather_rows(x.numbers(name).to(dtype), found)[None] for name in "kv"]
            for dtype in (FP64, BF16)
        )
        ref, ref_lse, _ = attention_ref(rows[None], *wide, causal=True)
        std, _, _ = standard_attention(rows[None], *plain, causal=True)
        at = slice(int(cu_q[b]), int(cu_q[b + 1]))
        assert_accurate("out", out[at], ref[0], std[0])
        assert_lse("lse", lse[:, at].contiguous(), ref_lse[0])
