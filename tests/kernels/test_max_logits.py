"""Largest logits from the kernels that keep them: with score mods, and Hopper's plain ones."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Case, make_inputs, rng_state
from compare import assert_bitwise, assert_within, largest
from packed_cases import in_pages
from reference import max_logits_ref, varlen_ref

from . import calls
from .test_forward_kernels import DTYPES, FULL, ROWS, SCORE_MODS, id_of, in_turns

PLAIN = [row for row in ROWS if (row.scores, row.arch, row.cluster) == ("plain", "sm90", 1)]
KEEPERS = [*FULL, *PLAIN]


def assert_logits(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert_within(name, ours, expected, 1e-5 + 3e-6 * float(largest(expected)))


def of_heads(rows: torch.Tensor) -> torch.Tensor:
    """(h,) of rows, (b, h, s) or packed (h, total)."""
    return rows.amax((0, 2) if rows.dim() == 3 else 1)


def check(kernels, row, case: Case, rng=None) -> None:
    """Also: out and lse have the bits of a call that does not ask and takes the same tile, and
    heads' logits are those of their rows."""
    x = make_inputs(case)
    options = case.mask_kwargs() | x.scores_kwargs() | {"softcap": case.softcap}
    options["softmax_scale"] = case.scale
    drops = {"dropout_p": case.dropout_p, "rng_state": rng}
    plain, (out, lse, rows), heads = (
        calls.dense(kernels, row.name, x.q, x.k, x.v, max_logits=of, **options, **drops)
        for of in ("", "rows", "heads")
    )
    assert_logits("max_logits", rows, max_logits_ref(x.q, x.k, x.v, **options)[1])
    for name, asked in (("rows", (out, lse)), ("heads", heads)):
        assert_bitwise(f"out with {name}", asked[0], plain[0])
        assert_bitwise(f"lse with {name}", asked[1], plain[1])
    assert_bitwise("of heads", heads[2], of_heads(rows))


SHAPES = [
    dict(sq=129, sk=500),
    dict(sq=257, sk=129, causal=True),  # the first rows see nothing
    dict(sq=150, sk=600, window=(37, 5), kind="outliers"),
    dict(sq=113, sk=700, causal=True, kind="growing"),
    dict(sq=5, sk=0),
    dict(sq=300, sk=400, kind="large"),
    dict(sq=190, causal=True, sinks=True),  # rows with nothing but the sink
]


@pytest.mark.parametrize(("row", "shape"), in_turns(KEEPERS, SHAPES))
def test_masks_and_values(kernels, row, shape):
    sizes = dict(b=1, h=2, hk=1, d=row.head_dim, dv=row.head_dim_v) | shape
    tiles = ["first"] + ["second"] * (row.second_block_n > 0) + ["packed"] * (row in PLAIN)
    for tile in tiles:
        check(calls.OnTile(kernels, tile), row, Case(dtype=DTYPES[row.dtype], **sizes))


# With so many keys that a row's largest logit may be in any of several KV blocks.
LONG_MODS = [mods | dict(sk=mods["sk"] + 200) if "sk" in mods else mods for mods in SCORE_MODS]


@pytest.mark.parametrize(("row", "mods"), in_turns(FULL, LONG_MODS))
def test_score_mods(kernels, row, mods):
    sizes = dict(b=2, h=2, hk=1, d=row.head_dim, dv=row.head_dim_v)
    check(kernels, row, Case(dtype=DTYPES[row.dtype], **sizes, **mods), rng_state("cpu"))


def slowly_rising(row, highest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k (1, s, 2, d) whose scores grow from KV block to KV block by less than what moves the
    softmax's maximum: in one head towards the last key, in the other towards the first."""
    keys = 5 * row.block_n
    steps = torch.linspace(highest - 4, highest, keys)
    q, k = (torch.zeros(1, n, 2, row.head_dim, dtype=DTYPES[row.dtype]) for n in (200, keys))
    q[..., 0] = 1
    k[0, :, 0, 0], k[0, :, 1, 0] = steps, steps.flip(0)
    return q, k


@pytest.mark.parametrize("highest", [-20.0, -0.5, 0.0, 0.5])
@pytest.mark.parametrize("row", KEEPERS, ids=id_of)
def test_slowly_rising_scores(kernels, row, highest):
    """To the bit: each product has one term."""
    q, k = slowly_rising(row, highest)
    options = {"softmax_scale": 1.0, "causal": row.dtype == "fp16"}
    rows, heads = (
        calls.dense(kernels, row.name, q, k, k[..., : row.head_dim_v], max_logits=of, **options)[2]
        for of in ("rows", "heads")
    )
    assert_bitwise("max_logits", rows, max_logits_ref(q, k, k, **options)[1].float())
    assert_bitwise("of heads", heads, of_heads(rows))


@pytest.mark.parametrize("row", KEEPERS, ids=id_of)
def test_packed(kernels, row):
    """Sequences without queries or keys, and rows that belong to none: -inf."""
    cu_q, cu_k = (
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for n in ([0, 150, 3, 0, 60], [10, 70, 200, 5, 0])
    )
    dtype = DTYPES[row.dtype]
    q = torch.randn(213 + row.block_m + 12, 2, row.head_dim).to(dtype)
    k, v = (torch.randn(300, 1, d).to(dtype) for d in (row.head_dim, row.head_dim_v))
    q[cu_q[-1] :] = k[cu_k[-1] :] = v[cu_k[-1] :] = float("nan")
    rows, heads = (
        calls.varlen(kernels, row.name, q, k, v, cu_q, cu_k, causal=True, max_logits=of)[2]
        for of in ("rows", "heads")
    )
    assert_bitwise("of heads", heads, of_heads(rows))
    ends = cu_q.tolist(), cu_k.tolist()
    assert_logits("max_logits", rows, varlen_ref(max_logits_ref, q, k, v, *ends, causal=True)[1])


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("row", PLAIN, ids=id_of)
def test_pages(kernels, row, page_size):
    dtype, keys = DTYPES[row.dtype], torch.tensor([700, 0, 333], dtype=torch.int32)
    cu_k = torch.tensor([0, *keys]).cumsum(0)
    k, v = (torch.randn(int(cu_k[-1]), 1, d).to(dtype) for d in (row.head_dim, row.head_dim_v))
    table, k_pages, v_pages = in_pages(cu_k.tolist(), page_size, k, v)
    cu_q = torch.tensor([0, 150, 153, 160], dtype=torch.int32)
    q = torch.randn(160, 2, row.head_dim).to(dtype)
    rows, heads = (
        calls.varlen(
            kernels,
            row.name,
            q,
            k_pages,
            v_pages,
            cu_q,
            None,
            seqused_k=keys,
            block_table=table,
            causal=True,
            max_logits=of,
        )[2]
        for of in ("rows", "heads")
    )
    assert_bitwise("of heads", heads, of_heads(rows))
    ends = cu_q.tolist(), cu_k.tolist()
    assert_logits("max_logits", rows, varlen_ref(max_logits_ref, q, k, v, *ends, causal=True)[1])


@pytest.mark.parametrize("of", [1, -1])
@pytest.mark.parametrize("row", PLAIN, ids=id_of)
def test_rows_of_one_sign(kernels, row, of):
    """What stays below 0 has no order as integers."""
    q, k = (torch.rand(1, n, 2, row.head_dim).to(DTYPES[row.dtype]) for n in (130, 600))
    v = torch.randn(1, 600, 2, row.head_dim_v).to(q)
    rows, heads = (
        calls.dense(kernels, row.name, q * of, k, v, max_logits=asked)[2]
        for asked in ("rows", "heads")
    )
    assert_logits("max_logits", rows, max_logits_ref(q * of, k, v)[1])
    assert_bitwise("of heads", heads, of_heads(rows))


# A warp's 16 rows have several of each head, some of them two, or one at most.
GROUPS = [1, 2, 3, 4, 7, 8, 11, 16, 20, 64]


@pytest.mark.parametrize(("row", "group"), in_turns(PLAIN, GROUPS))
def test_heads_of_a_group(kernels, row, group):
    """Rows of pack-GQA, whose heads have their largest logits in any place, and of either sign."""
    heads, dtype = 2 * group, DTYPES[row.dtype]
    q = torch.zeros(2, 45, heads, row.head_dim, dtype=dtype)
    q[..., 0] = torch.randn(2, 45, heads) - 2.0
    q[:, :, 1::3, 0] -= 100.0  # nothing but negative ones
    k = torch.zeros(2, 70, 2, row.head_dim, dtype=dtype)
    k[..., 0] = torch.rand(2, 70, 2) + 0.5
    v = torch.randn(2, 70, 2, row.head_dim_v).to(dtype)
    packed = calls.OnTile(kernels, "packed")
    found = calls.dense(packed, row.name, q, k, v, max_logits="heads", softmax_scale=1.0)[2]
    rows = max_logits_ref(q, k, v, softmax_scale=1.0)[1]
    assert_bitwise("heads", found, of_heads(rows).float())


VALUES = [
    (math.nan, math.nan),  # NaN is larger than all
    (math.inf, math.inf),
    (-math.inf, None),  # the largest of the others
]


@pytest.mark.parametrize(("value", "largest"), VALUES, ids=str)
@pytest.mark.parametrize("row", [row for row in KEEPERS if row.dtype == "bf16"], ids=id_of)
def test_extreme_scores(kernels, row, value, largest):
    """One key of one head; the other head has none of it."""
    q, k, v = (torch.randn(1, n, 2, d).bfloat16() for n, d in (
        (130, row.head_dim), (300, row.head_dim), (300, row.head_dim_v)))  # fmt: skip
    q[..., 0] = 1.0
    k[0, 77, 1] = 0.0
    k[0, 77, 1, 0] = value
    rows, heads = (
        calls.dense(kernels, row.name, q, k, v, max_logits=of)[2] for of in ("rows", "heads")
    )
    k[0, 77, 1] = k[0, 76, 1]
    expected = max_logits_ref(q, k, v)[1]
    if largest is not None:
        expected[:, 1] = largest
    assert_logits("max_logits", rows, expected)
    assert_bitwise("of heads", heads, of_heads(rows))


@pytest.mark.parametrize(("sm", "scores"), [(80, "full"), (90, "plain"), (120, "full")])
def test_which_kernel_serves(kernels, sm, scores):
    smem = 227 << 10 if sm == 90 else 99 << 10
    name, rejected = kernels.select("bf16", 128, 128, False, sm, smem, 0, True)
    (row,) = (row for row in ROWS if row.name == name)
    assert row.scores == scores
    plain = f"fwd_sm{row.arch[2:]}_bf16_d128_plain"
    assert (rejected.get(plain) == "keeps no largest logits") == (scores == "full")
