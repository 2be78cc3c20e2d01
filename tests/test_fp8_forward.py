"""Attention of codes, q, k and v: results against float64 attention of the numbers they are."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BF16, FP16, Case
from coded_cases import KINDS, make_coded, pack_coded
from compare import assert_accurate, assert_bitwise, assert_lse
from fp8_cases import FP8, NAN_CODE, VALUES
from packed_cases import LENGTHS
from packed_cases import written_out as packed_written_out
from reference import attention_ref, standard_attention
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.dispatch import fp8

CASES = [
    Case(),
    Case(sq=17, sk=257, h=6, hk=2, causal=True),
    Case(sq=129, sk=17, causal=True, d=128),
    Case(b=1, sq=64, sk=300, h=4, hk=1, window=(33, 65), d=40),
    Case(sq=100, sk=100, causal=True, window=(20, 0), d=72, softcap=15.0),
    Case(sq=31, sk=90, d=96, alibi="bh", causal=True),
    Case(sq=60, sk=60, d=200, sinks=True, causal=True),
    Case(b=1, sq=40, sk=70, d=192, dv=128, softcap=30.0, alibi="h", sinks=True),
    Case(b=1, sq=1, sk=200, d=256, h=8, hk=2),
    Case(b=3, sq=50, sk=50, d=64, kind="outliers"),
    Case(b=1, sq=50, sk=50, d=64, kind="low_rank", scale=-0.3),
]


@pytest.fixture(params=["operation", "ordinary"])
def way(request, monkeypatch) -> str:
    """What a GPU does without a kernel of the operation, too."""
    if request.param == "ordinary":
        monkeypatch.setattr(fp8, "forward", fp8.by_ordinary_forward)
    return request.param


def accurate(way: str, x, coded, out, lse, reference) -> None:
    """reference: from an attention to the same call of it, (q, k, v, s_aux) → out, lse."""
    ref_out, ref_lse = reference(attention_ref)(*coded.numbers.values(), x.s_aux)
    of_scores = (coded.descales["q_descale"], coded.descales["k_descale"])
    ordinary = way == "ordinary" or fp8._on_gpu(out)
    rounds_q = ordinary and any(isinstance(given, Tensor) for given in of_scores)  # to bfloat16
    dtype = BF16 if rounds_q else out.dtype
    std_out, _ = reference(standard_attention)(*coded.in_dtype(dtype), x.s_aux)
    assert_accurate("out", out, ref_out, std_out.to(out.dtype))

    def standard_lse():
        if rounds_q:
            return reference(attention_ref)(*coded.in_dtype(BF16), x.s_aux)[1]
        return reference(standard_attention)(*coded.in_dtype(torch.float32), x.s_aux)[1]

    assert_lse("lse", lse, ref_lse, standard_lse)


def options_of(case: Case, x) -> dict:
    return {
        "softmax_scale": case.scale, "softcap": case.softcap, "alibi_slopes": x.alibi_slopes,
        "s_aux": x.s_aux, **case.mask_kwargs(),
    }  # fmt: skip


def dense_of(case: Case, x):
    def reference(attention):
        def call(q, k, v, s_aux):
            return attention(q, k, v, s_aux=s_aux, **case.reference_kwargs(x))[:2]

        return call

    return reference


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense(case, kind, way, device):
    x, coded = make_coded(case, kind, device)
    dtype = FP16 if case.b == 1 else BF16
    out, lse = flash_attn_func(
        **coded.codes, **coded.descales, **options_of(case, x), return_lse=True, out_dtype=dtype
    )
    assert out.dtype == dtype
    accurate(way, x, coded, out, lse, dense_of(case, x))


PACKED = [Case(causal=True), Case(d=72, alibi="bh", softcap=20.0), Case(d=128, dv=64, sinks=True)]


@pytest.mark.parametrize("kind", ["number", "head", "mixed"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed(case, lengths, kind, way, device):
    x, coded = pack_coded(case, LENGTHS[lengths], kind, device)
    out, lse = flash_attn_varlen_func(
        **coded.codes, **x.lengths, **coded.descales, **options_of(case, x), return_lse=True
    )
    accurate(way, x, coded, out, lse, packed_of(case, x))


def packed_of(case: Case, x):
    def reference(attention):
        return packed_written_out(case, x, attention)

    return reference


def in_pages(x, codes, size: int, device):
    """k and v as pages in any order, the first of which is NaN, and their table."""
    lengths = [b - a for a, b in zip(x.cu_k, x.cu_k[1:])]
    columns = max(-(-n // size) for n in lengths)
    order = torch.randperm(len(lengths) * columns) + 1
    table = order.view(len(lengths), columns).int()
    pages = []
    for name in "kv":
        rows = codes[name]
        page = torch.full((len(order) + 1, size, *rows.shape[1:]), NAN_CODE, dtype=torch.uint8)
        for i, n in enumerate(lengths):
            for j in range(n):
                row = rows[x.cu_k[i] + j].cpu().contiguous()
                page[table[i, j // size], j % size] = row.view(torch.uint8)
        pages.append(page.view(FP8).to(device))
    return (*pages, table.to(device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [16, 7])
def test_pages(size, kind, way, device):
    case = Case(causal=True, d=64)
    x, coded = pack_coded(case, LENGTHS["mixed"], kind, device)
    k, v, table = in_pages(x, coded.codes, size, device)
    out, lse = flash_attn_varlen_func(
        coded.codes["q"], k, v, **x.lengths, **coded.descales, causal=True, block_table=table,
        return_lse=True,
    )  # fmt: skip
    accurate(way, x, coded, out, lse, packed_of(case, x))


def every_code(device) -> torch.Tensor:
    """(256, 1, 1, 16): the first channel of each is a code, the others 0."""
    codes = torch.zeros(256, 1, 1, 16, dtype=torch.uint8)
    codes[..., 0] = torch.arange(256).view(256, 1, 1)
    return codes.view(FP8).to(device)


def test_every_code(way, device):
    """One key each: its score is what q and k make, its value the result."""
    codes, values = every_code(device), VALUES.float()
    one = torch.zeros(256, 1, 1, 16, device=device)
    one[..., 0] = 1.0
    one = one.to(FP8)
    for q, k in ((codes, one), (one, codes)):
        out, lse = flash_attn_func(q, k, one, softmax_scale=0.5, q_descale=2.0, return_lse=True)
        torch.testing.assert_close(lse.cpu().flatten(), values, equal_nan=True, rtol=1e-6, atol=0)
        assert_bitwise("NaN", out[..., 0].isnan().cpu().flatten(), values.isnan())
    for dtype in (BF16, FP16):
        out = flash_attn_func(one, one, codes, v_descale=0.5, out_dtype=dtype)
        assert_bitwise("out", out[..., 0].cpu().flatten(), (values * 0.5).to(dtype))


def test_nan_reaches_the_rows_that_see_it(way, device):
    _, coded = make_coded(Case(b=1, sq=40, sk=40), "none", device)
    codes = {name: x.clone() for name, x in coded.codes.items()}
    codes["k"].view(torch.uint8)[0, 20, 0] = NAN_CODE
    out, lse = flash_attn_func(**codes, causal=True, return_lse=True)
    group = 2  # heads of q that read head 0
    assert out[0, 20:, :group].isnan().all()
    assert lse[0, :group, 20:].isnan().all()
    assert out[0, :20].isfinite().all()
    assert out[0, :, group:].isfinite().all()


def test_sequences_without_keys_have_no_descale(way, device):
    """Nor have rows of no sequence."""
    case = Case()
    x, coded = pack_coded(case, ([3, 9, 4], [5, 0, 6]), "head", device)
    descales = {}
    for name, given in coded.descales.items():
        descales[name] = given.clone()
        descales[name][1] = math.nan
    out, lse = flash_attn_varlen_func(**coded.codes, **x.lengths, **descales, return_lse=True)
    for rows in (slice(3, 12), slice(16, None)):
        assert not out[rows].any()
        assert (lse[:, rows] == -math.inf).all()
    assert out[:3].isfinite().all()


def test_slices_of_packed_codes(way, device):
    """Any strides: head_dim of 40 rows that begin anywhere."""
    qkv = torch.randn(2, 33, 8, 40).to(FP8).to(device)
    parts = qkv.split([4, 2, 2], 2)
    whole = flash_attn_func(*(x.clone(memory_format=torch.contiguous_format) for x in parts))
    torch.testing.assert_close(flash_attn_func(*parts), whole, atol=1e-2, rtol=1e-2)


def test_batch_invariant(way, device):
    _, coded = make_coded(Case(b=4, sq=33, sk=70), "head", device)
    some = slice(1, 3)
    options = {"causal": True, "batch_invariant": True, "return_lse": True}
    out, lse = flash_attn_func(**coded.codes, **coded.descales, **options)
    alone, alone_lse = flash_attn_func(
        **{name: x[some] for name, x in coded.codes.items()},
        **{name: x[some] for name, x in coded.descales.items()}, **options,
    )  # fmt: skip
    assert_bitwise("out", alone, out[some])
    assert_bitwise("lse", alone_lse, lse[some])


@pytest.mark.parametrize(
    "shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)], ids=["batch", "rows", "keys", "all"]
)
def test_nothing(shape, way, device):
    b, sq, sk = shape
    q, k = (torch.zeros(b, n, 2, 24, device=device).to(FP8) for n in (sq, sk))
    descale = torch.ones(b, 2, device=device)
    out, lse = flash_attn_func(q, k, k, q_descale=descale, v_descale=descale, return_lse=True)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == -math.inf).all()
    assert lse.shape == (b, 2, sq)
    ends = torch.zeros(b + 1, dtype=torch.int32, device=device)
    flat = q.flatten(0, 1)
    out = flash_attn_varlen_func(
        flat, flat, flat, ends, ends, 1, 1, q_descale=descale, v_descale=descale
    )
    assert not out.any()


def test_large_and_small_descales(way, device):
    """Their product counts: scores are as without them."""
    _, coded = make_coded(Case(b=2), "none", device)
    plain, lse = flash_attn_func(**coded.codes, return_lse=True)
    for given in (1e4, torch.full((2, 2), 1e4, device=device)):
        small = 1 / given
        out, same = flash_attn_func(
            **coded.codes, q_descale=given, k_descale=small, v_descale=small, return_lse=True
        )
        torch.testing.assert_close(same, lse, atol=2e-2, rtol=1e-3)
        torch.testing.assert_close(out.float() * 1e4, plain.float(), atol=2e-2, rtol=2e-2)
