"""A backward's tiles in parts of their rows: which are whose, and how many parts pay."""

from __future__ import annotations

import heapq
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

# In rows, as core/group_parts.h and core/tile_cut.h have it: a tile's beginning and end, its sums
# in fp32, and a launch.
TILE_ROWS, SUM_ROWS, PASS_ROWS = 100, 160, 100


@given(st.integers(0, 20), st.integers(1, 20), st.integers(2, 9), st.integers(0, 40))
def test_every_step_of_a_tile_is_in_one_part(core, whole, count, parts, steps):
    drawn = core.drawn_parts(whole=whole, count=count, parts=parts, steps=steps)
    assert [tile for tile, *_ in drawn] == sorted(tile for tile, *_ in drawn)
    assert [slot for _, slot, *_ in drawn if slot >= 0] == list(range(count * parts))
    for tile in range(whole + count):
        runs = [run for number, _, *run in drawn if number == tile]
        assert len(runs) == (1 if tile < whole else parts)
        assert [step for begin, end in runs for step in range(begin, end)] == list(range(steps))
        lengths = [end - begin for begin, end in runs]
        assert max(lengths) - min(lengths) <= 1


def rows_until_done(tiles: list[int], heads: int, block_m: int, places: int, parts: int):
    """By running every part, in the order of a launch: a place takes the next when it is free."""
    free = [0] * places
    for rows in tiles:
        blocks = -(-rows // block_m)
        for part in range(parts):
            run = (part + 1) * blocks // parts - part * blocks // parts
            done = run * block_m if parts > 1 else rows
            heapq.heapreplace(free, free[0] + heads * done + TILE_ROWS)
    sums = len(tiles) * parts * SUM_ROWS / places + PASS_ROWS if parts > 1 else 0
    return max(free) + sums


def times(core, rng: random.Random, is_causal: bool) -> tuple[float, float, float]:
    """Of the parts that are chosen, of whole tiles, and the least of as many parts as may be."""
    heads, columns, blocks = rng.randint(1, 4), rng.randint(1, 12), rng.randint(4, 32)
    places, most_slots = rng.choice([66, 108, 132]), rng.choice([16, 256, 4096])
    block_m = rng.choice([64, 128])
    rows = [128 * (blocks - i if is_causal else blocks) for i in range(blocks)]
    tiles = [n for n in rows for _ in range(columns)]
    chosen = core.best_row_parts(
        heads=heads, tiles=len(tiles), rows=sum(rows) / blocks, most=rows[0], places=places,
        block_m=block_m, most_slots=most_slots,
    )  # fmt: skip
    most = max(1, min(8, most_slots // len(tiles), -(-rows[0] // block_m)))
    assert 1 <= chosen <= most
    taken = {n: rows_until_done(tiles, heads, block_m, places, n) for n in range(1, most + 1)}
    return taken[chosen], taken[1], min(taken.values())


@pytest.mark.parametrize("is_causal", [False, True])
def test_parts_are_about_as_fast_as_any(core, is_causal):
    rng = random.Random(0)
    results = [times(core, rng, is_causal) for _ in range(400)]
    to_best = [chosen / best for chosen, _, best in results]
    assert statistics.mean(to_best) < 1.02
    assert max(to_best) < 1.3
    assert max(chosen / whole for chosen, whole, _ in results) < 1.03
    assert min(chosen / whole for chosen, whole, _ in results) < 0.5  # and it is worth it


def test_what_was_measured(core):
    """One sequence of 4k, four heads, d 128, on an H200: causal in two 1.4 times as fast, full in
    two 0.87."""
    call = dict(heads=1, tiles=128, most=4096, places=132, block_m=64, most_slots=256)
    assert core.best_row_parts(rows=2112, **call) == 2
    assert core.best_row_parts(rows=4096, **call) == 1
