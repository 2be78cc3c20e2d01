"""Query heads of a group in parts: which are whose, and how many parts pay."""

from __future__ import annotations

import heapq
import random
import statistics

from hypothesis import given
from hypothesis import strategies as st

# In rows, as core/group_parts.h has it: a tile's beginning and end, and its sums in fp32.
TILE_ROWS, SUM_ROWS = 100, 160


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 50))
def test_every_query_head_is_in_one_part(core, heads_kv, heads, part_heads):
    parts = core.parts_of_groups(heads_kv=heads_kv, heads=heads, part_heads=part_heads)
    found = [(kv, begin + i) for kv, begin, count in parts for i in range(count)]
    assert found == [(head // heads, head) for head in range(heads_kv * heads)]
    assert all(1 <= count <= part_heads for *_, count in parts)


def rows_until_done(blocks: list[int], columns: int, heads: int, part_heads: int, places: int):
    """By running every tile, in the order of a launch: a place takes the next when it is free."""
    parts = [min(part_heads, heads - begin) for begin in range(0, heads, part_heads)]
    free = [0] * places
    for rows in blocks:
        for _ in range(columns):
            for part in parts:
                heapq.heapreplace(free, free[0] + part * rows + TILE_ROWS)
    sums = len(blocks) * columns * len(parts) * SUM_ROWS / places if len(parts) > 1 else 0
    return max(free) + sums


def times(core, rng: random.Random) -> tuple[float, float, float]:
    """Of the parts that are chosen, of whole groups, and the least of as many parts as may be."""
    heads, columns, blocks = rng.randint(2, 16), rng.randint(1, 8), rng.randint(1, 32)
    places, most_parts = rng.choice([16, 66, 108, 132]), rng.randint(1, 16)
    is_causal = rng.random() < 0.5
    rows = [128 * (blocks - i if is_causal else blocks) for i in range(blocks)]
    chosen = core.best_part_heads(
        heads=heads, tiles=columns * blocks, rows=sum(rows) / blocks, most=rows[0], places=places,
        most_parts=most_parts,
    )  # fmt: skip
    assert -(-heads // chosen) <= most_parts
    allowed = {-(-heads // parts) for parts in range(1, min(heads, most_parts) + 1)}
    taken = {n: rows_until_done(rows, columns, heads, n, places) for n in allowed}
    return taken[chosen], taken[heads], min(taken.values())


def test_parts_are_about_as_fast_as_any(core):
    """A shorter last part of tiles that are alike counts as a whole one, so these may be missed."""
    rng = random.Random(0)
    results = [times(core, rng) for _ in range(500)]
    to_best = [chosen / best for chosen, _, best in results]
    assert statistics.mean(to_best) < 1.01
    assert max(to_best) < 1.25
    assert max(chosen / whole for chosen, whole, _ in results) < 1.05
    assert min(chosen / whole for chosen, whole, _ in results) < 0.2  # and it is worth it
