"""No two owners have a counter in common, however many there are and however much they ask for."""

from __future__ import annotations

import threading
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

FIRST = 1 << 14  # counters of the first slab
SECTOR = 8  # in 32 bytes


@pytest.fixture(scope="module")
def kinds(core) -> list:
    return [core.Counting.Tiles, core.Counting.Pieces]


def owner(kinds: list, device: int, capture: int, stream: int, kind: int) -> dict:
    return dict(device=device, capture=capture, stream=stream, what=kinds[kind])


owners = st.tuples(*(st.integers(0, n) for n in (1, 2, 2, 1)))


@given(st.lists(st.tuples(owners, st.integers(1, 40_000)), min_size=1))
def test_ranges(core, kinds, asked):
    """In memory that was made zero, apart from each other, and the same when asked for again."""
    arena, largest, has = core.CounterArena(FIRST), {}, {}
    given_out = {}  # each sector's owner, for ever: a launch may still count there
    for owned_by, count in asked:
        begin = arena.range(count, **owner(kinds, *owned_by))
        assert begin % SECTOR == 0
        assert begin + count <= sum(arena.slabs)
        if count <= largest.get(owned_by, 0):
            assert begin == has[owned_by]
        largest[owned_by], has[owned_by] = max(count, largest.get(owned_by, 0)), begin
        for sector in range(begin // SECTOR, (begin + count - 1) // SECTOR + 1):
            assert given_out.setdefault(sector, owned_by) == owned_by


def test_all_that_tells_owners_apart(core, kinds):
    arena = core.CounterArena(FIRST)
    begins = {arena.range(1, **owner(kinds, *owned_by)) for owned_by in product(range(2), repeat=4)}
    assert len(begins) == 16


def test_memory_of_many_captures(core, kinds):
    """A tile's counter and 500 pieces' each: 2,080 bytes, of slabs that have room for 31."""
    arena = core.CounterArena(FIRST)
    for capture, kind in product(range(1, 1001), range(2)):
        arena.range(500 if kind == 1 else 1, **owner(kinds, 0, capture, 0, kind))
    assert set(arena.slabs) == {64 << 10 >> 2}
    assert sum(arena.slabs) * 4 <= 1000 * 2080 * 1.04


def test_the_first_slab_is_used_up(core):
    """It is the kernels' own: what does not fit there leaves the rest to others."""
    arena = core.CounterArena(FIRST)
    assert arena.range(FIRST // 2, stream=1) == 0
    assert arena.range(FIRST, stream=2) >= FIRST
    assert arena.range(FIRST // 2, stream=3) == FIRST // 2
    assert arena.range(1, stream=4) >= 2 * FIRST
    assert arena.slabs == [FIRST, FIRST, FIRST]


def test_each_device_has_slabs_of_its_own(core):
    arena = core.CounterArena(FIRST)
    assert arena.range(1, device=0) < FIRST <= arena.range(1, device=1)


def test_an_owner_that_asks_for_ever_more(core):
    """Leaves less behind than it has."""
    arena = core.CounterArena(FIRST)
    for count in range(1, 200_000, 999):
        arena.range(count)
    assert sum(arena.slabs) <= 2 * (1 << 18) + FIRST


def test_threads(core):
    """Each of a thread's ranges is its own, and no slab is made twice."""
    arena, begins = core.CounterArena(FIRST), [[] for _ in range(4)]
    start = threading.Barrier(len(begins))

    def ask(number: int) -> None:
        start.wait()
        for stream in range(500):
            begins[number].append(arena.range(SECTOR, stream=2000 * (stream % 2) + stream // 2))

    threads = [threading.Thread(target=ask, args=[n]) for n in range(len(begins))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert begins[1:] == begins[:-1]
    assert len(set(begins[0])) == 500
    assert len(arena.slabs) == 1
