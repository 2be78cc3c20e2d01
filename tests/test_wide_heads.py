"""Head dims from 257 to 512: every feature, on each backend."""

from __future__ import annotations

import pytest
import torch
from cache_cases import CacheCase
from calls import check_backward, check_forward
from cases import BF16, FP16, NO_WINDOW, Case, build, make_inputs, pairwise
from compare import assert_accurate, assert_bitwise
from packed_cases import pack
from reference import attention_ref, standard_attention
from test_kvcache import check as check_cache
from test_varlen import FEW, into_pages, written_out
from test_varlen import check_backward as check_packed_backward
from test_varlen import check_forward as check_packed_forward

import flash_attn

DIMS = [(512, 512), (320, 320), (264, 512), (512, 64), (96, 288)]
SMALL = {"b": 1, "h": 2, "hk": 1, "d": 512}

CASES = build(
    pairwise(
        dtype=[BF16, FP16],
        d__dv=DIMS,
        sq__sk=[(70, 70), (1, 129), (65, 17), (31, 150)],
        causal__window=[(False, NO_WINDOW), (True, NO_WINDOW), (False, (20, 3))],
        h__hk=[(2, 2), (4, 1), (3, 1)],
        layout=["poisoned", "transposed", "contiguous"],
    )
)
SCORES = [
    Case(**SMALL, sq=65, sk=97, causal=True, **options)
    for options in (
        {"softcap": 3.0},
        {"alibi": "bh"},
        {"sinks": True},
        {"dropout_p": 0.3},
        {"softcap": 5.0, "alibi": "h", "sinks": True, "dropout_p": 0.2, "dtype": FP16},
    )
]
VALUES = [
    Case(**SMALL, sq=40, sk=130, kind=kind)
    for kind in ("low_rank", "outliers", "large", "constant", "growing")
]


@pytest.mark.parametrize("case", CASES + SCORES + VALUES, ids=str)
def test_forward(case, device):
    check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("case", CASES + SCORES, ids=str)
def test_backward(case, device):
    check_backward(case, make_inputs(case, device), with_dlse=True)


@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal, device):
    case = Case(**SMALL, causal=causal)
    x = pack(case, ([70, 1, 0, 33], [70, 40, 5, 65]), device)
    check_packed_forward(case, x)
    check_packed_backward(case, x)


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("lengths", FEW)
@pytest.mark.parametrize("d", [512, 300])
def test_queries_in_pages(d, lengths, page_size, device):
    """Few of each sequence are decoded, alone or beside chunks; rows of odd sizes are not."""
    case = Case(d=d, causal=True)
    x = pack(case, FEW[lengths], device)
    k, v, table = into_pages(x, page_size)
    out = flash_attn.flash_attn_varlen_func(
        x.q, k, v, **x.lengths, causal=True, block_table=table
    )  # fmt: skip
    ref, std = (written_out(case, x, f)(x.q, x.k, x.v) for f in (attention_ref, standard_attention))
    assert_accurate("out", out, ref[0], std[0])


CACHES = [
    CacheCase("read", d=512),
    CacheCase("read_mha", d=320, h=3, hk=3, dtype=FP16),
    CacheCase("read_other_values", d=128, dv=400, h=8, hk=1),
    CacheCase("read_odd", d=300, dv=290),
    CacheCase("read_chunk", d=512, sq=40, cache_seqlens=(40, 128, 64)),
    CacheCase("score_mods", d=512, softcap=5.0, alibi="bh", sinks=True, sq=2),
    CacheCase("window", d=512, sq=3, window=(20, 0)),
    CacheCase("append", d=512, new=3, sq=3, rotary_dim=512),
    CacheCase("append_rotated_halves", d=512, new=1, rotary_dim=128, interleaved=False),
    CacheCase("append_odd", d=300, new=2, sq=2),
    CacheCase("leftpad", d=512, leftpad=(0, 100, 2)),
    CacheCase("batch_idx", d=512, batch_idx=True, new=2, sq=2),
    CacheCase("pages", d=512, page_size=16, sq=2, cache_seqlens=(37, 128, 16)),
    CacheCase("pages_of_3", d=384, page_size=3, new=2, sq=2),
    CacheCase("pages_chunk", d=512, page_size=64, sq=70, cache_seqlens=(70, 128, 128)),
    CacheCase("pages_chunk_of_16", d=400, page_size=16, sq=140, hk=1, cache_seqlens=(140, 3, 146)),
    CacheCase("pages_chunk_of_24", d=512, page_size=24, sq=70, hk=4, window=(90, 3)),
    CacheCase("pages_chunk_of_5", d=512, page_size=5, sq=70, cache_seqlens=(70, 128, 128)),
]


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("case", CACHES, ids=lambda case: case.name)
def test_cache(case, num_splits, device):
    check_cache(case, device, num_splits=num_splits)


def test_deterministic(device):
    case = Case(b=2, sq=150, sk=150, h=2, hk=1, d=512, causal=True)
    x = make_inputs(case, device)
    inputs = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    runs = []
    for _ in range(2):
        out = flash_attn.flash_attn_func(*inputs, causal=True, deterministic=True)
        runs.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    for name, first, second in zip(("dq", "dk", "dv"), *runs):
        assert_bitwise(name, first, second)


def test_largest_logits(device):
    case = Case(**SMALL, sq=65, sk=97, causal=True, kind="growing")
    x = make_inputs(case, device)
    *_, logits = flash_attn.flash_attn_func(x.q, x.k, x.v, causal=True, return_max_logits=True)
    scores = torch.einsum("bqhd,bkd->bhqk", x.q.double(), x.k[:, :, 0].double()) * 512**-0.5
    hidden = torch.ones(65, 97, dtype=torch.bool, device=x.q.device).triu(97 - 65 + 1)
    expected = scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


def test_codes_are_refused_on_a_gpu(device, request):
    if request.node.callspec.params["device"] == "cpu":
        pytest.skip("the CPU reads them")
    q = torch.zeros(1, 1, 2, 512, dtype=BF16, device=device)
    cache = torch.zeros(1, 8, 1, 512, dtype=torch.float8_e4m3fn, device=device)
    with pytest.raises(NotImplementedError, match=r"codes .* head dims above 256"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache)
