"""Split-KV: every unit of every tile is in exactly one piece, whatever the lengths are."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

units = st.lists(
    st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 400)), min_size=1, max_size=70
)


def pieces(schedule, lengths):
    """Thread block -> its piece, for those that have one."""
    every = {n: schedule.piece(lengths, n) for n in range(schedule.num_pieces())}
    return {n: piece for n, piece in every.items() if piece is not None}


def check_cover(schedule, lengths, tiles, max_splits):
    seen = defaultdict(list)
    for index, (sequence, tile, split, splits, first, begin, end) in pieces(
        schedule, lengths
    ).items():
        assert 0 <= split < splits <= max_splits
        assert index == (first + split) * tiles + tile  # where its part of the workspace is
        seen[sequence, tile].append((split, splits, begin, end))
    assert sorted(seen) == list(itertools.product(range(len(lengths)), range(tiles)))
    for (sequence, _), parts in seen.items():
        parts.sort()
        assert [p[0] for p in parts] == list(range(parts[0][1]))
        covered = [unit for *_, begin, end in parts for unit in range(begin, end)]
        assert covered == list(range(lengths[sequence]))


@settings(deadline=None)
@given(units, st.integers(1, 5), st.integers(1, 4), st.integers(1, 12), st.integers(1, 60))
def test_each_unit_is_in_one_piece(core, lengths, tiles, min_units, max_splits, wanted):
    schedule = core.SplitSchedule(
        batch=len(lengths), tiles=tiles, min_units=min_units, max_splits=max_splits, wanted=wanted
    )
    check_cover(schedule, lengths, tiles, max_splits)


@settings(deadline=None)
@given(units, st.integers(1, 5), st.integers(1, 60))
def test_pieces_are_as_long_as_the_gpu_wants(core, lengths, tiles, wanted):
    """Not longer than an even share, rounded up, and hardly shorter than half of it."""
    schedule = core.SplitSchedule(batch=len(lengths), tiles=tiles, min_units=2, wanted=wanted)
    share = max(2, -(-sum(lengths) * tiles // wanted))
    for sequence, _, _, splits, _, begin, end in pieces(schedule, lengths).values():
        assert end - begin <= share
        if splits > 1:
            assert end - begin >= lengths[sequence] // splits >= share // 2


@pytest.mark.parametrize("wanted", [1, 8, 396])
def test_the_workspace_does_not_grow_with_the_capacity(core, wanted):
    schedule = core.SplitSchedule(batch=7, tiles=8, wanted=wanted)
    assert schedule.num_columns() == 7 + wanted // 8


def test_without_splits_nothing_is_read(core):
    schedule = core.SplitSchedule(batch=3, tiles=2, max_splits=1, wanted=100)
    assert schedule.num_pieces() == 6
    assert [schedule.piece([5, 0, 9], n)[:4] for n in range(6)] == [
        (b, tile, 0, 1) for b in range(3) for tile in range(2)
    ]


def test_a_limit_is_used_in_full(core):
    schedule = core.SplitSchedule(batch=3, tiles=1, max_splits=4, wanted=2**31 - 1)
    splits = {piece[0]: piece[3] for piece in pieces(schedule, [3, 0, 50]).values()}
    assert splits == {0: 3, 1: 1, 2: 4}


def test_huge_batches_and_lengths(core):
    """Products beyond 32 bits, and beyond 53."""
    longest, batch, tiles = 2**25, 3000, 70_000
    schedule = core.SplitSchedule(batch=batch, tiles=tiles, wanted=2**31 - 1)
    lengths = [longest] * batch
    last = None
    for column in (0, 17, batch * 5, schedule.num_columns() - 1):
        piece = schedule.piece(lengths, column * tiles + tiles - 1)
        if piece is not None:
            last = piece
            assert piece[1] == tiles - 1
            assert piece[4] + piece[2] == column
    assert last is not None
