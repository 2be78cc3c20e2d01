"""Hopper's backward where the key blocks that see a row block add dQ in order."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compare import assert_bitwise

from . import calls
from .test_backward_kernels import ROWS, check, exact, id_of, sized
from .test_backward_kv_persistent import MASKED, NAMES, PLAIN, by_turns

# Tiles of so few iterations that each is the first of its tile, the last, or both.
SHORT = [
    dict(sq=64, sk=400, b=2, hk=2),  # one
    dict(sq=130, sk=130, causal=True, b=5, hk=2),  # one behind two or three
    dict(sq=200, sk=300, h=1),  # a thread block has three tiles
    dict(sq=64, sk=600, window=(150, 0), b=3, h=1),  # one or none: no row sees most keys
    dict(sq=300, sk=140, window=(-1, 0), b=3, hk=2),  # the second block of keys has the last rows
]


@pytest.mark.parametrize(
    ("row", "deterministic", "shape"), by_turns(PLAIN, [dict(sq=1, sk=300), *MASKED])
)
def test_masks_and_lengths(kernels, row, deterministic, shape):
    check(kernels, row, sized(row, **shape), ordered_dq=True, deterministic=deterministic)


# Rows whose kernels compute D by the way, where each query sees a key.
COMPUTING = [row for row in PLAIN if row.head_dim <= 192]
COMPUTED = [
    dict(sq=1, sk=300),
    dict(sq=300, sk=300, causal=True, b=3),
    dict(sq=450, sk=450, causal=True, b=2, h=3, hk=3),
    dict(sq=300, sk=500, window=(100, 30), b=2),
    dict(sq=200, sk=333, window=(60, -1), causal=True, layout="transposed"),
    dict(sq=128, sk=256, b=5, h=1),
]


@pytest.mark.parametrize(
    "row", [v for v in ROWS if v.name.replace("fp16", "bf16") in map(id_of, COMPUTING)], ids=id_of
)
def test_delta_has_the_bits_of_the_pass(kernels, row):
    """And what is computed with it: of columns that are not there, groups and sinks."""
    dims = dict(d=row.head_dim - 24, dv=row.head_dim_v - 8)
    x = exact(row, b=2, h=4, hk=2, sq=290, sk=400, **dims)
    sinks = torch.tensor([0.5, -1.0, 2.0, float("-inf")])
    run = partial(
        calls.backward, kernels, row.name, *x, causal=True, s_aux=sinks, dlse=torch.rand(2, 4, 290),
        ordered_dq=True, split_heads=1, deterministic=True,
    )  # fmt: skip
    by_the_pass, by_the_warp = run(), run(computes_delta=True)
    for name, a, b in zip((*NAMES, "ds_aux"), by_the_warp, by_the_pass, strict=True):
        assert_bitwise(name, a, b)


@pytest.mark.parametrize("row", COMPUTING, ids=id_of)
@pytest.mark.parametrize("shape", SHORT[:3], ids=str)
def test_computes_delta_of_short_tiles(kernels, row, shape):
    """In which each row sees a key."""
    check(kernels, row, sized(row, **shape), ordered_dq=True, computes_delta=True)


@pytest.mark.parametrize(("row", "deterministic", "shape"), by_turns(PLAIN, SHORT))
def test_short_tiles(kernels, row, deterministic, shape):
    """A tile's last iteration starts the next one's scores; that one's first has its last dQ."""
    check(kernels, row, sized(row, **shape), ordered_dq=True, deterministic=deterministic)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize(
    ("split_heads", "shape"),
    [
        (1, dict(h=4, hk=2, sq=150, sk=300, causal=True)),
        (2, dict(h=5, b=2, sq=130, sk=210, window=(90, 40))),  # the last part has one head
    ],
    ids=str,
)
def test_groups_in_parts(kernels, row, split_heads, shape):
    check(kernels, row, sized(row, **shape), split_heads=split_heads, ordered_dq=True)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
def test_smaller_head_dims_sinks_and_the_gradient_of_lse(kernels, row):
    dims = dict(d=row.head_dim - 24, dv=row.head_dim_v - 8)
    case = sized(row, b=2, h=3, hk=3, sq=190, sk=290, causal=True, sinks=True, **dims)
    check(kernels, row, case, dlse=True, ordered_dq=True)


@pytest.mark.parametrize(("row", "deterministic", "shape"), by_turns(COMPUTING, COMPUTED))
def test_computes_delta_itself(kernels, row, deterministic, shape):
    """While the others compute: no pass over dO and O before."""
    case = sized(row, **shape)
    check(
        kernels,
        row,
        case,
        ordered_dq=True,
        computes_delta=True,
        dlse=True,
        deterministic=deterministic,
    )


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize("mask", [dict(causal=True), dict(window_size=(140, 60))], ids=str)
def test_sums_in_the_order_of_a_semaphore(kernels, row, mask):
    """It has the bits of a dQ semaphore, with zeros before and a pass behind."""
    run = partial(
        calls.backward, kernels, row.name, *exact(row, b=2, sq=290, sk=400),
        deterministic=True, **mask,
    )  # fmt: skip
    by_semaphore = run()
    for last_block_first in (False, True):
        results = run(ordered_dq=True, last_block_first=last_block_first)
        for name, a, b in zip(NAMES, results, by_semaphore, strict=True):
            assert_bitwise(name, a, b)
