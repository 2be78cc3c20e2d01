"""Split-KV: every unit of every tile is in exactly one piece, whatever the lengths are."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

units = st.lists(
    st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 400)), min_size=1, max_size=70
)
packed = st.lists(
    st.tuples(st.one_of(st.just(0), st.integers(0, 60)), st.integers(0, 4)), min_size=1, max_size=50
)
# Before the first sequence and behind the last one.
of_none = st.tuples(st.integers(0, 5), st.integers(0, 5))


def pieces(schedule, lengths, row_blocks=None):
    """Thread block -> its piece, for those that have one."""
    every = {n: schedule.piece(lengths, n, row_blocks) for n in range(schedule.num_pieces())}
    return {n: piece for n, piece in every.items() if piece is not None}


def pieces_of(schedule, lengths) -> list[int]:
    """The pieces of each sequence."""
    found = {piece[0]: piece[3] for piece in pieces(schedule, lengths).values()}
    return [found[b] for b in range(len(lengths))]


def check_cover(schedule, lengths, tiles, max_pieces, row_blocks=None):
    """tiles: of a sequence, or with row_blocks of each block of a sequence."""
    seen, places = defaultdict(list), defaultdict(set)
    found = pieces(schedule, lengths, row_blocks)
    for index, (sequence, tile, number, count, first, step, begin, end) in found.items():
        assert 0 <= number < count <= max_pieces
        assert index == first + number * step  # where its part of the workspace is
        places[sequence, tile].add((first, step))
        seen[sequence, tile].append((number, count, begin, end))
    wanted = {
        (b, tile)
        for b in range(len(lengths))
        for tile in range(tiles * (1 if row_blocks is None else row_blocks[b]))
    }
    assert set(seen) == wanted
    assert all(len(place) == 1 for place in places.values())
    for (sequence, _), parts in seen.items():
        parts.sort()
        assert [p[0] for p in parts] == list(range(parts[0][1]))
        covered = [unit for *_, begin, end in parts for unit in range(begin, end)]
        assert covered == list(range(lengths[sequence]))
        longest, shortest = (f(end - begin for *_, begin, end in parts) for f in (max, min))
        assert longest - shortest <= 1


@settings(deadline=None)
@given(
    units, st.integers(1, 5), st.integers(1, 4), st.integers(1, 12), st.integers(1, 60)
)  # fmt: skip
def test_each_unit_is_in_one_piece(core, lengths, tiles, min_units, max_pieces, slices):
    schedule = core.PieceSchedule(
        batch=len(lengths), tiles=tiles, min_units=min_units, max_pieces=max_pieces, slices=slices
    )
    check_cover(schedule, lengths, tiles, max_pieces)


@settings(deadline=None)
@given(packed, of_none, st.integers(1, 60), st.integers(0, 30))
def test_rows_of_no_sequence_keep_their_slices(core, sizes, of_none, slices, extra):
    lengths, row_blocks = ([size[i] for size in sizes] for i in range(2))
    row_blocks += of_none
    schedule = core.PieceSchedule(
        batch=len(sizes), tiles=1, min_units=2, slices=slices, extra=extra,
        all_row_blocks=sum(row_blocks),
    )  # fmt: skip
    check_cover(schedule, [*lengths, 0, 0], 1, 1 << 30, row_blocks)


@settings(deadline=None)
@given(units, st.integers(1, 60), st.integers(0, 60))
def test_pieces_fit_into_few_slices_more(core, lengths, slices, extra):
    """However they are to be cut."""
    schedule = core.PieceSchedule(
        batch=len(lengths), tiles=1, min_units=2, slices=slices, extra=extra
    )
    assert schedule.num_slices() == len(lengths) + extra
    check_cover(schedule, lengths, 1, 1 << 30)


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 400),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 60),
)
def test_equal_lengths_need_no_search(core, batch, length, tiles, max_pieces, slices):
    searched, computed = (
        core.PieceSchedule(
            batch=batch, tiles=tiles, equal=equal, max_pieces=max_pieces, slices=slices
        )
        for equal in (False, True)
    )
    assert pieces(computed, [length] * batch) == pieces(searched, [length] * batch)


# ---- packed batches: row blocks have slices of their own ----------------------------------------


@settings(deadline=None)
@given(
    packed, of_none, st.integers(1, 3), st.sampled_from([1, 2, 12]), st.integers(1, 60),
    st.integers(0, 9),
)  # fmt: skip
def test_each_row_block_is_cut_like_a_sequence(
    core, sizes, of_none, tiles, max_pieces, slices, surplus
):
    """Those of the rows that belong to no sequence come last, and have no keys."""
    lengths, row_blocks = ([size[i] for size in sizes] for i in range(2))
    row_blocks += of_none
    schedule = core.PieceSchedule(
        batch=len(sizes), tiles=tiles, min_units=2, max_pieces=max_pieces, slices=slices,
        all_row_blocks=sum(row_blocks) + surplus,
    )  # fmt: skip
    check_cover(schedule, [*lengths, 0, 0], tiles, max_pieces, row_blocks)
    counts = {(piece[0], piece[3]) for piece in pieces(schedule, lengths, row_blocks).values()}
    assert len(counts) == sum(n > 0 for n in row_blocks)  # all of a sequence alike


def test_row_blocks_that_read_the_same_keys_lie_side_by_side(core):
    schedule = core.PieceSchedule(batch=2, tiles=2, slices=8, all_row_blocks=6)
    found = pieces(schedule, [6, 6], [3, 1, 0, 1])
    assert [piece[:3] for _, piece in sorted(found.items())] == [
        *((0, tile, number) for number in range(2) for tile in range(6)),
        *((1, tile, number) for number in range(2) for tile in range(2)),
        (3, 0, 0),
        (3, 1, 0),
    ]


@settings(deadline=None)
@given(packed, of_none, st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 5, 2**30]))
def test_a_tile_has_all_its_pieces_or_none(
    core, sizes, of_none, slices, all_row_blocks, max_pieces
):
    """Where sequences have more row blocks than there are rows for, which is wrong."""
    lengths, row_blocks = ([size[i] for size in sizes] for i in range(2))
    row_blocks += of_none
    schedule = core.PieceSchedule(
        batch=len(sizes), tiles=1, slices=slices, max_pieces=max_pieces,
        all_row_blocks=all_row_blocks,
    )  # fmt: skip
    numbers = defaultdict(list)
    for sequence, tile, number, count, *_ in pieces(schedule, lengths, row_blocks).values():
        numbers[sequence, tile, count].append(number)
        assert tile < row_blocks[sequence]
    assert all(sorted(found) == list(range(count)) for (*_, count), found in numbers.items())


def test_more_row_blocks_than_can_be_added_up(core):
    """Of a wrong length: no CTA has them, and those of the others have their places."""
    schedule = core.PieceSchedule(batch=3, tiles=1, slices=3, max_pieces=7, all_row_blocks=2**28)
    sizes = [9, 9, 9], [1, 2**27, 1, 0, 0]
    count = schedule.piece(sizes[0], 0, sizes[1])[3]
    assert schedule.piece(sizes[0], count, sizes[1]) is None
    assert schedule.piece(sizes[0], count + 2**24, sizes[1])[:3] == (2, 0, 0)


def test_more_slices_than_an_int_counts(core):
    """Of wrong lengths: 2^32 of them are too few by two pieces of each row block of the first."""
    many = 2**20
    schedule = core.PieceSchedule(
        batch=4095, tiles=1, slices=4 * many, extra=many, all_row_blocks=many
    )
    sizes = [100] + [0] * 4094, [many] * 4095 + [0, 0]
    assert schedule.piece(sizes[0], 0, sizes[1])[:4] == (0, 0, 0, 1)


# ---- the length of a piece ----------------------------------------------------------------------


def shortest_piece(lengths, slices, min_units=2) -> int:
    return max(min_units, -(-sum(lengths) // slices))


@settings(deadline=None)
@given(units, st.integers(1, 60))
def test_pieces_that_fit_are_not_lengthened(core, lengths, slices):
    schedule = core.PieceSchedule(batch=len(lengths), tiles=1, min_units=2, slices=slices)
    piece = shortest_piece(lengths, slices)
    shortest = [max(1, -(-n // piece)) for n in lengths]
    counts = pieces_of(schedule, lengths)
    if sum(shortest) <= max(slices, len(lengths)):
        assert counts == shortest
    else:
        assert all(few <= many for few, many in zip(counts, shortest, strict=True))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 400), st.integers(1, 12), st.booleans())
def test_a_batch_of_one_length_fits(core, batch, length, each, equal):
    schedule = core.PieceSchedule(
        batch=batch, tiles=1, equal=equal, min_units=1, slices=each * batch
    )
    counts = pieces_of(schedule, [length] * batch)
    assert set(counts) == {max(1, -(-length // max(1, -(-length // each))))}
    assert counts[0] <= each


@settings(deadline=None)
@given(units, st.integers(1, 60))
def test_pieces_are_lengthened_within_bounds(core, lengths, slices):
    """By a quarter, or each time in proportion to how many are too many, which are no more than
    sequences."""
    schedule = core.PieceSchedule(batch=len(lengths), tiles=1, min_units=2, slices=slices)
    longest = max(end - begin for *_, begin, end in pieces(schedule, lengths).values())
    surplus = len(lengths) / max(slices, len(lengths))
    growth = max(1.25, 1 + surplus + surplus**2 + surplus**3)
    assert longest <= shortest_piece(lengths, slices) * growth + 3


@pytest.mark.parametrize(
    ("lengths", "slices", "counts"),
    [
        ([100, 20, 20, 20], 16, [10, 2, 2, 2]),  # 10 units each, and 16 pieces
        ([100, 25, 25, 10], 16, [8, 2, 2, 1]),  # 17 of 10, and 13 of 13, a quarter longer
        ([90, 1, 1, 1, 1, 1, 1, 1], 9, [9, 1, 1, 1, 1, 1, 1, 1]),  # 16 of 11: 17 are there
    ],
)
def test_lengthening(core, lengths, slices, counts):
    schedule = core.PieceSchedule(batch=len(lengths), tiles=1, min_units=2, slices=slices)
    assert pieces_of(schedule, lengths) == counts


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([100, 110, 90, 95], [1, 1, 1, 1]),  # none is longer than the mean and a quarter
        ([160, 40, 120, 80], [2, 1, 2, 1]),  # of 100, with what slices are left
        ([300, 40, 130, 130], [2, 1, 1, 1]),  # 150 is the mean, and 8 pieces of it too many
    ],
)
def test_lengths_that_differ_use_what_slices_there_are(core, lengths, counts):
    schedule = core.PieceSchedule(batch=4, tiles=1, min_units=2, slices=4, extra=2)
    assert pieces_of(schedule, lengths) == counts


@pytest.mark.parametrize("slices", [1, 8, 49])
def test_the_workspace_does_not_grow_with_the_capacity(core, slices):
    schedule = core.PieceSchedule(batch=7, tiles=8, slices=slices)
    assert schedule.num_slices() == 7 + slices


def test_without_pieces_nothing_is_read(core):
    schedule = core.PieceSchedule(batch=3, tiles=2, max_pieces=1, slices=100)
    assert schedule.num_pieces() == 6
    assert [schedule.piece([5, 0, 9], n)[:4] for n in range(6)] == [
        (b, tile, 0, 1) for b in range(3) for tile in range(2)
    ]


def test_a_limit_is_used_in_full(core):
    schedule = core.PieceSchedule(batch=3, tiles=1, max_pieces=4, slices=2**31 - 1)
    assert pieces_of(schedule, [3, 0, 50]) == [3, 1, 4]


def test_huge_batches_and_lengths(core):
    """Products beyond 32 bits, and beyond 53."""
    longest, batch, tiles = 2**30, 3000, 70_000
    lengths = [longest] * batch
    schedule = core.PieceSchedule(batch=batch, tiles=tiles, slices=9000)
    for slice_ in (0, 17, 8999):
        sequence, tile, number, count, first, step, begin, end = schedule.piece(
            lengths, slice_ * tiles + tiles - 1
        )
        assert (sequence, tile, number, count) == (slice_ // 3, tiles - 1, slice_ % 3, 3)
        assert first + number * step == slice_ * tiles + tiles - 1
        assert (begin, end) == (
            longest * number // 3 + (number > 0), longest * (number + 1) // 3 + (number < 2)
        )  # fmt: skip
    assert schedule.piece(lengths, 9000 * tiles) is None
    one = core.PieceSchedule(batch=batch, tiles=1, slices=1)
    assert pieces_of(one, lengths) == [1] * batch
