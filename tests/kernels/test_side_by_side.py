"""Thread blocks that run at the same time, and of which none knows how far the others are.

Elsewhere one cluster runs after the other, so that no CTA ever waits for another one's tile.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from compare import assert_bitwise

from . import calls, test_decode_kernels, test_packed_decode
from .test_backward_kernels import check, exact, id_of, sized
from .test_backward_kv_persistent import NAMES, PLAIN
from .test_backward_ordered_dq import COMPUTED, COMPUTING, SHORT
from .test_hopper_forward import SAMPLES

SEEDS = range(3)


class SideBySide:
    """The kernels on a GPU of so many multiprocessors, which chance lets go on one by one.

    Nothing else differs in calls of the same `seed`. l2_bytes: of the GPU's.
    """

    def __init__(self, kernels: ModuleType, blocks: int, seed: int, l2_bytes: int = 50 << 20):
        self._kernels = kernels
        self._how = {"side_by_side": blocks, "seed": seed, "l2_bytes": l2_bytes}

    def __getattr__(self, name: str):
        return getattr(self._kernels, name)

    def run(self, variant: str, call: dict) -> None:
        self._kernels.run(variant, call | self._how)

    def run_decode(self, variant: str, call: dict) -> bool:
        return self._kernels.run_decode(variant, call | self._how)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("way", "seeds"), [({}, 1), ({"kv_persistent": True}, 1), ({"ordered_dq": True}, 4)]
)
@pytest.mark.parametrize(
    ("blocks", "shape"),
    [
        (8, dict(sq=200, sk=400, causal=True, b=2)),
        (4, dict(sq=300, sk=330, window=(150, 40))),
    ],
    ids=str,
)
def test_backward(kernels, row, deterministic, way, seeds, blocks, shape):
    case = sized(row, h=2, hk=2, **shape)
    for seed in range(seeds):
        check(SideBySide(kernels, blocks, seed), row, case, deterministic=deterministic, **way)


@pytest.mark.parametrize("row", COMPUTING, ids=id_of)
@pytest.mark.parametrize("shape", COMPUTED, ids=str)
@pytest.mark.parametrize("l2_bytes", [1 << 16, 50 << 20])
def test_ordered_dq_with_delta_warps(kernels, row, shape, l2_bytes):
    """Rows wait for D that another CTA computes. With a small L2 little of it is there before."""
    case = sized(row, **shape)
    for seed in SEEDS:
        beside = SideBySide(kernels, 2, seed, l2_bytes)
        check(beside, row, case, ordered_dq=True, computes_delta=True, deterministic=seed == 0)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize("shape", SHORT, ids=str)
@pytest.mark.parametrize("l2_bytes", [1 << 16, 50 << 20])
def test_short_tiles_with_ordered_dq(kernels, row, shape, l2_bytes):
    """Many to a CTA: another CTA waits for a tile's last dQ while this one is at its next tile.

    With a small L2 the tiles of one KV block come after the other: tiles without rows after others
    with some.
    """
    case = sized(row, **shape)
    for seed in SEEDS:
        beside = SideBySide(kernels, 2, seed, l2_bytes)
        check(beside, row, case, ordered_dq=True, deterministic=seed == 0)


@pytest.mark.parametrize("row", PLAIN, ids=id_of)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("l2_bytes", [1 << 16, 50 << 20])
def test_deterministic_backward_has_the_same_bits(kernels, row, seed, l2_bytes):
    """In whatever order CTAs run. With a small L2 few KV blocks are at work at a time, more CTAs on
    each."""
    x = exact(row, b=2, sq=150, sk=500)
    options = dict(deterministic=True, causal=True)
    in_order = calls.backward(kernels, row.name, *x, **options)
    beside = SideBySide(kernels, 8, seed, l2_bytes)
    for ordered_dq in (False, True):
        results = calls.backward(beside, row.name, *x, ordered_dq=ordered_dq, **options)
        for name, a, b in zip(NAMES, results, in_order, strict=True):
            assert_bitwise(name, a, b)


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
@pytest.mark.parametrize("seed", SEEDS)
def test_forward_draws_each_tile_once(kernels, row, seed):
    gen = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 3, 300, 4, row.head_dim, generator=gen).to(torch.bfloat16)
    alone = calls.dense(kernels, row.name, q, k, v, causal=True)
    beside = calls.dense(SideBySide(kernels, 5, seed), row.name, q, k, v, causal=True)
    for name, a, b in zip(("out", "lse"), beside, alone, strict=True):
        assert_bitwise(name, a, b)


@pytest.mark.parametrize("row", test_decode_kernels.SMALL, ids=id_of)
@pytest.mark.parametrize("seed", SEEDS)
def test_decode_merges(kernels, row, seed):
    test_decode_kernels.test_merging(SideBySide(kernels, 16, seed), row, h=5, sq=1)


@pytest.mark.parametrize("row", test_packed_decode.SMALL, ids=id_of)
@pytest.mark.parametrize("seed", SEEDS)
def test_packed_decode_merges(kernels, row, seed):
    test_packed_decode.test_merging(SideBySide(kernels, 16, seed), row, longest=3)
