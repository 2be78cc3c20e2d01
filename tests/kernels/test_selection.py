"""Which row of the table serves a call: every head dim, on GPUs of every size."""

import itertools

import pytest

from . import calls
from .rows import FORWARDS

ROWS = FORWARDS
# Shared memory that a block can have, in bytes, by compute capability.
GPUS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
HEAD_DIMS = [8, 32, 40, 64, 72, 96, 128, 136, 192, 200, 256]


@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_pair_of_head_dims_has_a_row(kernels, dtype, full, sm):
    for d, dv in itertools.product(HEAD_DIMS, HEAD_DIMS):
        name, rejected = kernels.select(dtype, d, dv, full, sm, GPUS[sm])
        assert name, (d, dv, rejected)
        chosen = next(row for row in ROWS if row.name == name)
        assert chosen.dtype == dtype
        assert chosen.scores == "full" or not full
        assert chosen.head_dim >= d
        assert chosen.head_dim_v >= dv
        for row in ROWS[: ROWS.index(chosen)]:
            too_small = row.head_dim < d or row.head_dim_v < dv or (full and row.scores == "plain")
            other = row.dtype != dtype or (row.arch == "sm90" and sm != 90)
            expected = "" if too_small or other else "shared memory"
            assert expected in rejected[row.name]


@pytest.mark.parametrize(
    ("head_dims", "served_by"),
    [
        ((64, 64), "d64"),
        ((8, 16), "d32"),
        ((40, 72), "d96"),
        ((96, 128), "d128"),
        ((192, 128), "d192x128"),
        ((136, 64), "d192x128"),
        ((128, 192), "d192"),
        ((64, 256), "d256"),
    ],
)
def test_unequal_head_dims(kernels, head_dims, served_by):
    name, _ = kernels.select("bf16", *head_dims, False, 80, GPUS[80])
    assert name == f"fwd_sm80_bf16_{served_by}_plain"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_hopper_has_rows_of_its_own(kernels, head_dim):
    name, _ = kernels.select("bf16", head_dim, head_dim, False, 90, GPUS[90])
    assert name == f"fwd_sm90_bf16_d{head_dim}_plain"


@pytest.mark.parametrize(
    ("page_size", "sm", "row"),
    [
        (8, 90, "fwd_sm90_bf16_d96_plain"),
        (24, 90, "fwd_sm90_bf16_d96_plain"),
        (256, 90, "fwd_sm90_bf16_d96_plain"),
        (1, 90, "paged_sm80_bf16_d128_plain"),
        (20, 90, "paged_sm80_bf16_d128_plain"),
        (16, 80, "paged_sm80_bf16_d128_plain"),
        (16, 120, "paged_sm80_bf16_d128_plain"),
    ],
)
def test_keys_in_pages(kernels, page_size, sm, row):
    name, rejected = kernels.select("bf16", 96, 96, False, sm, GPUS[sm], page_size)
    assert name == row
    assert rejected["fwd_sm80_bf16_d96_plain"] == "is fwd"
    if sm == 90 and row.startswith("paged"):
        assert "multiple of 8 rows" in rejected["fwd_sm90_bf16_d96_plain"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"page_size": 12}, False),
        ({"leftpad_k": 1}, False),
        ({"v": (0, 16 * 512 + 8, 512, 64)}, False),  # pages that are not whole rows apart
        ({"v": (0, 2 * 16 * 512, 512, 64)}, True),
        ({"k": (0, 8 * 16 * 64, 64, 16 * 64)}, True),  # heads before rows
        ({"k": (0, 2**40, 64, 2**36)}, False),  # more rows than an int counts
        ({"k": (0, 2**40, 64, 2**36), "pages": 1}, True),
    ],
    ids=str,
)
def test_pages_that_are_boxes(kernels, more, expected):
    view = (0, 16 * 512, 512, 64)
    call = calls.problem(heads_q=8, heads_kv=8, block_table=ANY, page_size=16, pages=100)
    assert kernels.pages_are_boxes(call | {"k": view, "v": view} | more) == expected


def test_a_row_that_does_not_fit_says_so(kernels):
    """Consumer GPUs hold every sm80 tile; one with less is told what it lacks."""
    row = "fwd_sm80_bf16_d256_full"
    assert kernels.select("bf16", 256, 256, True, 86, GPUS[86])[0] == row
    name, rejected = kernels.select("bf16", 256, 256, True, 86, 64 * 1024)
    assert not name
    assert "needs 98" in rejected[row]


def test_what_no_row_serves(kernels):
    name, rejected = kernels.select("bf16", 520, 520, False, 80, GPUS[80])
    assert not name
    assert set(rejected) >= {row.name for row in ROWS}


@pytest.mark.parametrize(
    ("sm", "full", "expected"),
    [
        (90, False, "fwd_sm90_bf16_d512_plain"),
        (90, True, "fwd_sm80_bf16_d512_full"),
        (80, False, "fwd_sm80_bf16_d512_plain"),
        (86, False, "fwd_sm80_bf16_d512_full_32x16"),
    ],
)
@pytest.mark.parametrize(("d", "dv"), [(512, 512), (264, 264), (64, 320), (320, 64)])
def test_which_row_serves_wide_heads(kernels, d, dv, sm, full, expected):
    assert kernels.select("bf16", d, dv, full, sm, GPUS[sm])[0] == expected


@pytest.mark.parametrize(
    ("shape", "num_splits", "sm", "expected"),
    [
        # A dense call: few rows, keys enough to cut, and an idle GPU.
        ((1, 1, 4096, 32, 8), None, 90, True),
        ((1, 65, 4096, 1, 1), None, 90, False),
        ((0, 1, 4096, 32, 8), None, 90, False),
        # With a cache: a step of generation; whatever fits where Hopper's forward is not there, or
        # where the caller asks for splits.
        ((128, 1, 512, 32, 32), 0, 90, True),
        ((128, 64, 512, 32, 32), 0, 90, False),
        ((128, 64, 512, 32, 32), 0, 80, True),
        ((128, 64, 512, 32, 32), 2, 90, True),
        ((1, 65, 512, 8, 8), 2, 90, False),
    ],
    ids=str,
)
def test_who_decodes(kernels, shape, num_splits, sm, expected):
    """Of head dim 128; tests/unit/test_plan_decode.py has the choices."""
    names = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv")
    call = calls.problem(**dict(zip(names, shape, strict=True)))
    assert kernels.decodes(call, num_splits, sm, sm_count=132) == expected


ANY = 1  # a pointer that is never followed


def packed(batch: int, longest: int, total_q: int, heads: tuple[int, int], **more) -> dict:
    shape = dict(batch=batch, seqlen_q=longest, total_q=total_q, heads_q=heads[0])
    return calls.problem(**shape, heads_kv=heads[1], seqlen_k=4096, cu_q=ANY) | more


PAGED = {"block_table": ANY}
BOXES = PAGED | {"page_size": 16, "pages": 1}
DRAFT = BOXES | {"seqlen_k": 8192, "left": 2047, "right": 0}
ALL = -1


@pytest.mark.parametrize(
    ("shape", "more", "expected"),
    [
        # Keys in pages that Hopper's forward cannot read: whatever fits 64 rows.
        ((64, 1, 64, (32, 8)), PAGED, ALL),
        ((64, 16, 1024, (32, 8)), PAGED, ALL),
        ((64, 17, 1088, (32, 8)), PAGED, 16),
        ((2, 1, 2, (65, 1)), PAGED, 0),
        ((2, 10, 12, (7, 1)), PAGED, 9),
        ((64, 4096, 64, (32, 32)), PAGED, ALL),  # no sequence has more than all have together
        ((64, 4096, 65, (32, 32)), PAGED, 64),
        ((2, 0, 2, (32, 8)), PAGED, 0),
        ((2, 3, 0, (32, 8)), PAGED, 0),
        ((0, 3, 2, (32, 8)), PAGED, 0),
        # Pages that it can read: steps of generation, and what must not depend on the batch.
        ((64, 1, 64, (32, 8)), BOXES, ALL),
        ((64, 5, 320, (32, 8)), BOXES | {"batch_invariant": True}, ALL),
        # A single sequence has many queries, as was said, unless that must not count.
        ((1, 17, 17, (32, 8)), PAGED, 0),
        ((1, 17, 17, (32, 8)), PAGED | {"batch_invariant": True}, 16),
        # Packed keys.
        ((64, 1, 64, (32, 8)), {"batch_invariant": True}, 0),
        ((64, 17, 1088, (32, 8)), {}, 0),
        ((64, 1, 64, (32, 8)), {"dropout_p": 0.1}, 0),
    ],
    ids=str,
)
def test_who_decodes_of_a_packed_batch(kernels, shape, more, expected):
    """The most queries of such a sequence, on Hopper."""
    call = packed(*shape, **more)
    assert kernels.few_queries(call, 0, 90, sm_count=132) == expected


def test_splits_that_were_asked_for_decode_pages(kernels):
    call = packed(64, 5, 320, (32, 8), **BOXES)
    assert kernels.few_queries(call, 2, 90, sm_count=132) == ALL


def test_another_gpu_has_another_plan(kernels):
    """Of the same call, asked for by turns: plans that are kept are of one GPU."""
    call = calls.problem(batch=128, seqlen_q=64, seqlen_k=512, heads_q=32, heads_kv=32)
    for _ in range(2):
        assert not kernels.decodes(call, 0, 90, sm_count=132)
        assert kernels.decodes(call, 0, 80, sm_count=132)
