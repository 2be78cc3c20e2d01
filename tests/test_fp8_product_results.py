"""Attention of codes whose products may be of codes too: packed sequences, pages, NaN, batches.

On a CPU, and on GPUs without such products, the same bounds hold with room to spare."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Case
from coded_cases import make_coded, pack_coded
from compare import assert_bitwise
from fp8_cases import FP8, NAN_CODE
from packed_cases import LENGTHS
from reference import attention_ref
from test_fp8_forward import dense_of, in_pages, options_of, packed_of

from flash_attn import flash_attn_func, flash_attn_varlen_func

CASES = [
    Case(),
    Case(sq=200, sk=257, h=6, hk=2, causal=True),
    Case(sq=129, sk=17, causal=True, d=128),
    Case(b=1, sq=64, sk=300, h=4, hk=1, window=(33, 65), d=40),
    Case(sq=100, sk=100, causal=True, window=(20, 0), d=72, softcap=15.0),
    Case(sq=31, sk=90, d=96, alibi="bh", causal=True),
    Case(sq=60, sk=60, d=200, sinks=True, causal=True),
    Case(b=1, sq=300, sk=400, d=192, dv=128),
    Case(b=1, sq=300, sk=400, d=256, h=8, hk=2),
]


def close(out, lse, reference, numbers, s_aux) -> None:
    """A sixteenth of each probability, what the tensor core leaves out of scores (2⁻¹⁰ of the
    largest) and of P v, and the rounding of out itself."""
    expected, expected_lse = (x.to(out.device) for x in reference(attention_ref)(*numbers, s_aux))
    size, _ = reference(attention_ref)(*numbers[:2], numbers[2].abs(), s_aux)
    values = numbers[2].nan_to_num()  # NaN in rows of no sequence
    largest = values.abs().amax() if values.numel() else 0
    finite = expected_lse.isfinite()
    of_scores = 2.0**-9 * max([1.0, *expected_lse[finite].abs().flatten().tolist()])
    bound = size.to(out.device) * (1 / 15 + 2 * of_scores)
    bound += largest * 2.0**-14 + expected.abs() / 256
    assert ((out - expected).abs() <= bound).all()
    error = (out.double() - expected).norm()
    assert error <= (0.04 + of_scores) * expected.norm() + 1e-6
    assert torch.equal(lse.isfinite(), finite)
    assert torch.allclose(lse.double()[finite], expected_lse[finite], atol=2e-3 + of_scores, rtol=0)


@pytest.mark.parametrize("kind", ["none", "head"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense(case, kind, device):
    x, coded = make_coded(case, kind, device)
    out, lse = flash_attn_func(
        **coded.codes, **coded.descales, **options_of(case, x), return_lse=True, fp8_products=True
    )
    close(out, lse, dense_of(case, x), list(coded.numbers.values()), x.s_aux)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "case", [Case(causal=True), Case(d=128, dv=64, sinks=True), Case(d=72, softcap=20.0)], ids=str
)
def test_packed(case, lengths, device):
    x, coded = pack_coded(case, LENGTHS[lengths], "head", device)
    out, lse = flash_attn_varlen_func(
        **coded.codes, **x.lengths, **coded.descales, **options_of(case, x), return_lse=True,
        fp8_products=True,
    )  # fmt: skip
    close(out, lse, packed_of(case, x), list(coded.numbers.values()), x.s_aux)


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("size", [8, 16, 64, 256])
def test_pages(size, d, device):
    case = Case(causal=True, d=d)
    lengths = ([150, 1, 70, 0], [450, 33, 300, 20])
    x, coded = pack_coded(case, lengths, "head", device)
    k, v, table = in_pages(x, coded.codes, size, device)
    out, lse = flash_attn_varlen_func(
        coded.codes["q"], k, v, **x.lengths, **coded.descales, causal=True, block_table=table,
        return_lse=True, fp8_products=True,
    )  # fmt: skip
    close(out, lse, packed_of(case, x), list(coded.numbers.values()), x.s_aux)


def test_missing_pages(device):
    """Keys on page -1 do not exist."""
    q = torch.randn(150, 4, 128).to(FP8).to(device)
    k, v = (torch.randn(5, 64, 2, 128).to(FP8).to(device) for _ in "kv")
    table = torch.tensor([[3, -1, 0, 4, 2]], dtype=torch.int32, device=device)
    ends = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (150, 320)]
    out = flash_attn_varlen_func(q, k, v, *ends, 150, 320, block_table=table, fp8_products=True)
    keys, values = (x[[3, 0, 4, 2]].flatten(0, 1)[None] for x in (k, v))
    whole = flash_attn_func(q[None], keys, values)[0].float()
    assert (out.float() - whole).norm() <= 0.04 * whole.norm()


def test_nan_reaches_the_rows_that_see_it(device):
    _, coded = make_coded(Case(b=1, sq=40, sk=40), "none", device)
    codes = {name: x.clone() for name, x in coded.codes.items()}
    codes["k"].view(torch.uint8)[0, 20, 0] = NAN_CODE
    out = flash_attn_func(**codes, causal=True, fp8_products=True)
    assert out[0, 20:, :2].isnan().all()
    assert out[0, :20].isfinite().all()
    assert out[0, :, 2:].isfinite().all()


def test_sequences_without_keys(device):
    x, coded = pack_coded(Case(), ([3, 9, 4], [5, 0, 6]), "none", device)
    out, lse = flash_attn_varlen_func(
        **coded.codes, **x.lengths, return_lse=True, fp8_products=True
    )
    for rows in (slice(3, 12), slice(16, None)):
        assert not out[rows].any()
        assert (lse[:, rows] == -math.inf).all()
    assert out[:3].isfinite().all()


@pytest.mark.parametrize("scale", [None, 0.1, 0.017])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("sq", "sk"), [(200, 250), (250, 120), (70, 700)])
def test_rows_that_see_nothing_of_their_first_keys(sq, sk, d, scale, device):
    """Or of any: their largest score so far stands for no key, with huge numbers."""
    case = Case(b=1, sq=sq, sk=sk, d=d, causal=True, scale=scale)
    x, coded = make_coded(case, "none", device)
    out, lse = flash_attn_func(
        **coded.codes, **options_of(case, x), return_lse=True, fp8_products=True
    )
    close(out, lse, dense_of(case, x), list(coded.numbers.values()), x.s_aux)


def test_scales_that_underflow(device):
    """All scores are 0: out is the mean of the values."""
    q, k, v = (torch.randn(1, 130, 1, 64).to(FP8).to(device) for _ in "qkv")
    tiny = torch.full((1, 1), 1e-30, device=device)
    out, lse = flash_attn_func(
        q, k, v, q_descale=tiny, k_descale=tiny, return_lse=True, fp8_products=True
    )
    assert (out.float() - v.float().mean(1, keepdim=True)).abs().max() < 0.03
    assert (lse - math.log(130)).abs().max() < 1e-3


@pytest.mark.parametrize(("d", "sk"), [(128, 300), (64, 300), (64, 1500)])
def test_batch_invariant(d, sk, device):
    """Head dim 64 has two tiles, of which the length decides."""
    _, coded = make_coded(Case(b=3, sq=150, sk=sk, d=d), "none", device)
    options = {"batch_invariant": True, "fp8_products": True}
    whole = flash_attn_func(**coded.codes, **options)
    alone = flash_attn_func(**{name: x[1:2] for name, x in coded.codes.items()}, **options)
    assert_bitwise("out", alone[0], whole[1])


def test_batch_invariant_in_pages(device):
    """A sequence of one query, beside one of 200 and alone."""
    case = Case(d=128, causal=True)
    x, coded = pack_coded(case, ([1, 200], [300, 300]), "none", device)
    k, v, table = in_pages(x, coded.codes, 64, device)
    options = {"causal": True, "batch_invariant": True, "fp8_products": True}
    q = coded.codes["q"]
    first, second = (x.cu_q[0], x.cu_q[1])
    both = flash_attn_varlen_func(q, k, v, **x.lengths, block_table=table, **options)
    ends = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (1, 300)]
    alone = flash_attn_varlen_func(
        q[first:second], k, v, *ends, 1, 300, block_table=table[:1], **options
    )
    assert_bitwise("out", alone, both[first:second])


def test_every_run_is_the_same(device):
    _, coded = make_coded(Case(b=2, sq=200, sk=300, d=128), "none", device)
    first, second = (flash_attn_func(**coded.codes, fp8_products=True) for _ in range(2))
    assert coded.codes["q"].dtype is FP8
    assert_bitwise("out", first, second)
