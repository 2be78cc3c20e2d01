"""Hopper's backward whose tiles of keys, or the last of them, have row splits."""

from __future__ import annotations

from functools import partial

import pytest
from compare import assert_bitwise

from . import calls
from .rows import TABLE
from .test_backward_kernels import check, exact, id_of, sized

PLAIN = [v for v in TABLE if v.name.startswith("bwd_sm90") and v.scores == "plain"]
SPLITTING = [v for v in PLAIN if v.head_dim == v.head_dim_v != 96]
TILES = [v for v in SPLITTING if v.dtype == "bf16"]
ALL = 1 << 20  # tiles


@pytest.mark.parametrize("row", TILES, ids=id_of)
@pytest.mark.parametrize(
    ("row_splits", "shape"),
    [
        ((3, 2), dict(sq=300, sk=300, h=4, hk=4, b=2)),
        ((2, 3), dict(sq=700, sk=130, h=4, hk=2)),
        ((ALL, 2), dict(sq=260, sk=257, h=2, hk=1, causal=True)),
        ((ALL, 5), dict(sq=140, sk=300, b=2)),  # more splits than row blocks
        ((2, 2), dict(sq=400, sk=250, h=3, window=(100, 30), layout="transposed")),
        ((1, 3), dict(sq=290, sk=50)),  # one block has all keys: dQ is not summed
        ((1, 2), dict(sq=0, sk=70)),
        ((1, 2), dict(sq=150, sk=300, window=(37, 5))),  # no query sees the last keys
    ],
    ids=str,
)
def test_masks_and_lengths(kernels, row, row_splits, shape):
    check(kernels, row, sized(row, **shape), row_splits=row_splits)


@pytest.mark.parametrize("row", SPLITTING, ids=id_of)
def test_smaller_head_dims_are_zero_filled(kernels, row):
    dims = dict(d=row.head_dim - 24, dv=row.head_dim_v - 8)
    check(kernels, row, sized(row, sq=290, sk=150, **dims), row_splits=(1, 2))


@pytest.mark.parametrize("row", SPLITTING, ids=id_of)
def test_gradients_of_keys_are_the_same_bits_in_any_order(kernels, row):
    """And both dtypes."""
    call = exact(row, sq=300, sk=300)
    run = partial(calls.backward, kernels, row.name, *call, row_splits=(3, 2))
    for name, a, b in zip(("dk", "dv"), run()[2:], run(last_block_first=True)[2:], strict=True):
        assert_bitwise(name, a, b)


@pytest.mark.parametrize("row", TILES[:1], ids=id_of)
@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dv",), ()])
def test_gradients_that_are_wanted(kernels, row, wanted):
    call = exact(row, sq=270, sk=190)
    run = partial(calls.backward, kernels, row.name, *call, row_splits=(2, 2))
    every = dict(zip(("dq", "dk", "dv"), run()[1:], strict=True))
    for name, got in zip(wanted, run(wanted=wanted)[1:], strict=True):
        if name != "dq":
            assert_bitwise(name, got, every[name])
