"""Hopper's backward whose last tiles of keys are cut along the rows."""

from __future__ import annotations

from functools import partial

import pytest
from compare import assert_bitwise

from . import calls
from .test_backward_kernels import TILES, check, exact, id_of, sized

ROWS = [v for v in TILES if v.arch == "sm90"]
PLAIN = [v for v in ROWS if v.scores == "plain"]
ALL = 1 << 20  # tiles


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        ((3, 2), dict(sq=300, sk=300, h=4, hk=4, b=2)),
        ((2, 3), dict(sq=700, sk=130, h=4, hk=2)),
        ((ALL, 2), dict(sq=260, sk=257, h=2, hk=1, causal=True)),
        ((ALL, 5), dict(sq=140, sk=300, b=2)),  # more parts than row blocks
        ((2, 2), dict(sq=400, sk=250, h=3, window=(100, 30), layout="transposed")),
        ((1, 3), dict(sq=290, sk=50)),  # one block has all keys: dQ is not summed
        ((1, 2), dict(sq=0, sk=70)),
        ((1, 2), dict(sq=150, sk=300, window=(37, 5))),  # the last keys are seen by nobody
    ],
    ids=str,
)
def test_masks_and_lengths(kernels, row, cut, shape):
    check(kernels, row, sized(row, **shape), cut=cut)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
def test_smaller_head_dims_are_zero_filled(kernels, row):
    dims = dict(d=row.head_dim - 24, dv=row.head_dim_v - 8)
    check(kernels, row, sized(row, sq=290, sk=150, **dims), cut=(1, 2))


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
def test_deterministic(kernels, row):
    """Parts take their tile's turns: nobody waits for one that is drawn later."""
    call = exact(row, sq=300, sk=300)
    run = partial(calls.backward, kernels, row.name, *call, deterministic=True)
    whole, cut = run(), run(cut=(3, 2))
    again = run(cut=(3, 2), last_block_first=True)
    assert_bitwise("dq", cut[1], whole[1])
    for name, a, b in zip(("dq", "dk", "dv"), cut[1:], again[1:], strict=True):
        assert_bitwise(name, a, b)


@pytest.mark.parametrize("row", PLAIN[:1], ids=id_of)
@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dv",), ()])
def test_gradients_that_are_wanted(kernels, row, wanted):
    call = exact(row, sq=270, sk=190)
    run = partial(calls.backward, kernels, row.name, *call, cut=(2, 2))
    every = dict(zip(("dq", "dk", "dv"), run()[1:], strict=True))
    for name, got in zip(wanted, run(wanted=wanted)[1:], strict=True):
        if name != "dq":
            assert_bitwise(name, got, every[name])
