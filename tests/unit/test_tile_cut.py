"""A backward's last tiles in parts of their rows: which are whose, and how many parts pay."""

from __future__ import annotations

import heapq
import random
import statistics

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


def rows_until_done(tiles: list[int], heads: int, block_m: int, places: int, cut: tuple[int, int]):
    """By running every part, in the order of a launch: a place takes the next when it is free."""
    count, parts = cut
    free = [0] * places
    for number, rows in enumerate(tiles):
        blocks = -(-rows // block_m)
        n = parts if number >= len(tiles) - count else 1
        for part in range(n):
            run = (part + 1) * blocks // n - part * blocks // n
            heapq.heapreplace(free, free[0] + heads * run * block_m + TILE_ROWS)
    return max(free) + (count * parts * SUM_ROWS / places + PASS_ROWS if count else 0)


def times(core, rng: random.Random, is_causal: bool) -> tuple[float, float]:
    """Of the cut that is chosen, and of whole tiles."""
    heads, columns, blocks = rng.randint(1, 4), rng.randint(1, 40), rng.randint(4, 32)
    places, most_slots = rng.choice([16, 66, 108, 132]), rng.choice([16, 256, 4096])
    block_m = rng.choice([64, 128])
    rows = [128 * (blocks - i if is_causal else blocks) for i in range(blocks)]
    tiles = [n for n in rows for _ in range(columns)]
    count, parts = cut = core.best_cut(
        heads=heads, tiles=len(tiles), rows=sum(rows) / blocks, most=rows[0], places=places,
        block_m=block_m, most_slots=most_slots,
    )  # fmt: skip
    assert count * parts <= max(most_slots, count)
    return tuple(rows_until_done(tiles, heads, block_m, places, c) for c in (cut, (0, 1)))


def test_cuts_of_tiles_that_are_alike(core):
    rng = random.Random(0)
    results = [times(core, rng, is_causal=False) for _ in range(400)]
    assert max(cut / whole for cut, whole in results) <= 1
    assert statistics.mean(cut / whole for cut, whole in results) < 0.95
    assert min(cut / whole for cut, whole in results) < 0.4


def test_cuts_of_causal_tiles(core):
    rng = random.Random(0)
    results = [times(core, rng, is_causal=True) for _ in range(400)]
    assert max(cut / whole for cut, whole in results) < 1.1
    assert min(cut / whole for cut, whole in results) < 0.6
