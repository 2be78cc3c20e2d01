"""Row blocks that are cut along the keys, so that the last round of a launch is full."""

import heapq

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st


def simulated(whole, parts, takers, start):
    """Each tile taken by whoever is free first."""
    free = [0.0] * takers
    for _ in range(whole[0]):
        heapq.heapreplace(free, free[0] + whole[1])
    end = max(free)
    free = [time + start for time in free]
    heapq.heapify(free)
    for _ in range(parts[0]):
        end = max(end, heapq.heapreplace(free, free[0] + parts[1]) + parts[1])
    return end


@settings(deadline=None, max_examples=1000)
@given(
    whole=st.tuples(st.integers(0, 60), st.integers(1, 40)),
    parts=st.tuples(st.integers(0, 60), st.integers(1, 40)),
    takers=st.integers(1, 9),
    start=st.integers(0, 5),
)
@example(whole=(1, 3), parts=(1, 1), takers=2, start=2)  # done before the last whole one
def test_time(core, whole, parts, takers, start):
    expected = simulated(whole, parts, takers, start)
    assert core.time_of_all(whole, parts, takers, start) == pytest.approx(expected)


CALL = {
    "rows": 8192, "block_m": 192, "columns": 16, "part_block_m": 192, "part_columns": 16,
    "takers": 132, "tile_time": 90.6, "part_steps": 64, "step_time": 1.4, "part_time": 1.7,
    "row_of_part": 1e-4, "most_rows": 100_000,
}  # fmt: skip


def test_a_round_with_many_empty_places(core):
    """5.2 rounds of tiles: two row blocks of each head are more than whole rounds."""
    rows, parts = core.best_last_rows(**CALL)
    assert 192 < rows <= 3 * 192
    assert (8192 - rows) % 192 == 0
    assert parts > 2


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 33 * 192, "columns": 8},  # two rounds, all places taken
        {"rows": 41 * 192},  # 4.97 rounds
        {"tile_time": 9, "step_time": 0.14, "part_time": 0.17},  # less lost than two launches take
        {"row_of_part": 1},
        {"part_steps": 3},
        {"most_rows": 2 * 192 * 16},
    ],
)
def test_where_nothing_is_gained(core, change):
    assert core.best_last_rows(**CALL | change) == (0, 0)


def test_memory_limits_the_parts(core):
    rows, parts = core.best_last_rows(**CALL | {"most_rows": 3 * 320 * 16})
    assert rows * 16 * parts <= 3 * 320 * 16
    assert parts < core.best_last_rows(**CALL)[1]


def test_few_row_blocks(core):
    """All of them in parts, where no round is whole."""
    call = CALL | {"rows": 700, "takers": 1000}
    assert core.best_last_rows(**call)[0] == 700
