"""Hopper's backward where a thread block, or a pair, takes a sequence's keys block by block."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from cases import BF16, poisoned
from compare import assert_bitwise

from . import calls
from .test_backward_kernels import TILES, check, check_varlen, exact, id_of, sized

PLAIN = [v for v in TILES if v.arch == "sm90" and v.scores == "plain"]
NAMES = ("softmax_d", "dq", "dk", "dv")
MASKED = [
    dict(sq=130, sk=400, b=2, h=4, hk=4),
    dict(sq=300, sk=300, causal=True, b=3),
    dict(sq=257, sk=129, causal=True),  # the first rows see nothing
    dict(sq=500, sk=170, causal=True),  # nor do whole blocks of rows
    dict(sq=150, sk=300, window=(37, 5)),  # no row sees the first keys
    dict(sq=450, sk=150, window=(0, 17)),
    dict(sq=300, sk=500, window=(100, 30), b=2),  # a row's first keys and last ones vary
    dict(sq=200, sk=333, window=(60, -1), causal=True, layout="transposed"),
    dict(sq=128, sk=256, window=(-1, 0), b=5, h=1),
]
# Three heads are at work at a time here: with more, sums are used again.


def by_turns(rows: list, shapes: list[dict]) -> list:
    """Every row with every shape or mask, deterministic or not by turns."""
    pairs = itertools.product(enumerate(rows), enumerate(shapes))
    return [
        pytest.param(row, (i + j) % 2 == 1, shape, id=f"{shape}-{(i + j) % 2 == 1}-{row.name}")
        for (i, row), (j, shape) in pairs
    ]


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize(
    "shape",
    [
        dict(sq=1, sk=1, h=6, hk=2),
        dict(sq=400, sk=70, causal=True),
        *MASKED,
        dict(sq=5, sk=0),
        dict(sq=0, sk=170),
    ],
    ids=str,
)
def test_masks_and_lengths(kernels, row, shape):
    check(kernels, row, sized(row, **shape), kv_persistent=True)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize(
    ("split_heads", "shape"),
    [
        (1, dict(h=4, hk=2, sq=150, sk=300, causal=True)),
        (2, dict(h=5, b=2, sq=130, sk=210, window=(90, 40))),  # the last part has one head
        (4, dict(h=4, b=2, sq=140, sk=270)),
        (1, dict(h=3, sq=90, sk=50, layout="transposed")),  # one block has all keys
    ],
    ids=str,
)
def test_groups_in_parts(kernels, row, split_heads, shape):
    check(kernels, row, sized(row, **shape), split_heads=split_heads, kv_persistent=True)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
def test_smaller_head_dims_are_zero_filled(kernels, row):
    dims = dict(d=row.head_dim - 24, dv=row.head_dim_v - 8)
    shape = dict(b=2, h=3, hk=3, sq=70, sk=290, causal=True)
    check(kernels, row, sized(row, **shape, **dims), kv_persistent=True)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
def test_sinks_and_the_gradient_of_lse(kernels, row):
    check(
        kernels,
        row,
        sized(row, b=2, sq=290, sk=140, causal=True, sinks=True),
        dlse=True,
        kv_persistent=True,
    )


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize("split_heads", [2, 1])  # of the two that share keys
def test_varlen(kernels, row, split_heads):
    check_varlen(kernels, row, split_heads=split_heads, kv_persistent=True)


@pytest.mark.parametrize(
    ("row", "deterministic", "mask"),
    by_turns(PLAIN, [dict(causal=True), dict(window_size=(140, 60))]),
)
def test_sums_in_the_order_of_a_semaphore(kernels, row, deterministic, mask):
    """Whichever CTA has a sequence, dq has the bits of a deterministic call with tiles."""
    run = partial(calls.backward, kernels, row.name, *exact(row, b=2, sq=290, sk=400), **mask)
    by_semaphore = run(deterministic=True)
    for last_block_first in (False, True):
        results = run(
            kv_persistent=True, deterministic=deterministic, last_block_first=last_block_first
        )
        for name, a, b in zip(NAMES, results, by_semaphore, strict=True):
            assert_bitwise(name, a, b)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dk", "dv"), ()])
def test_gradients_that_are_wanted(kernels, row, wanted):
    run = partial(calls.backward, kernels, row.name, *exact(row, sq=70, sk=290), kv_persistent=True)
    everything = dict(zip(NAMES, run(), strict=True))
    _, *some = run(wanted=wanted)
    for name, gradient in zip(wanted, some, strict=True):
        assert_bitwise(name, gradient, everything[name])


def packed(lengths: list[int], head_dim: int) -> tuple:
    """Arguments of `calls.backward` with one head, but for lengths; and where sequences start."""
    gen = torch.Generator().manual_seed(0)
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    shape = (sum(lengths), 1, head_dim)
    q, k, v = (poisoned(torch.randn(shape, generator=gen).to(BF16)) for _ in "qkv")
    return (q, q, k, v, q, torch.full((1, len(q)), 3.0)), cu


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
def test_more_rows_than_were_said(kernels, row):
    """They have no sums: dQ of their sequence is NaN; all else is right."""
    said = 2 * row.block_m
    call, cu = packed([row.block_m + 22, said + 1, said, 50], row.head_dim)
    run = partial(calls.backward, kernels, row.name, *call, kv_persistent=True)
    right = run(calls.varlen_lengths(*call[1:3], cu, cu))
    wrong = run(calls.varlen_lengths(*call[1:3], cu, cu, max_seqlen_q=said))
    long = slice(cu[1], cu[2])
    assert wrong[1][long].isnan().all()
    wrong[1][long] = right[1][long]
    for name, a, b in zip(NAMES, wrong, right, strict=True):
        assert_bitwise(name, a, b)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
def test_more_keys_than_were_said(kernels, row):
    """Of several blocks said, there may be any number; of one said, dQ of others is NaN."""
    call, cu = packed([row.block_n, row.block_n + 1, 400, 50], row.head_dim)
    run = partial(calls.backward, kernels, row.name, *call, kv_persistent=True)
    lengths = partial(calls.varlen_lengths, *call[1:3], cu, cu)
    right = run(lengths())
    for name, a, b in zip(NAMES, run(lengths(max_seqlen_k=row.block_n + 1)), right, strict=True):
        assert_bitwise(name, a, b)
    wrong = run(lengths(max_seqlen_k=row.block_n))
    long = slice(cu[1], cu[3])
    assert wrong[1][long].isnan().all()
    wrong[1][long] = right[1][long]
    for name, a, b in zip(NAMES, wrong, right, strict=True):
        assert_bitwise(name, a, b)
