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


def splits_of(schedule, lengths) -> list[int]:
    """The pieces of each sequence."""
    found = {piece[0]: piece[3] for piece in pieces(schedule, lengths).values()}
    return [found[b] for b in range(len(lengths))]


def check_cover(schedule, lengths, tiles, max_splits, row_blocks=None):
    """tiles: of a sequence, or with row_blocks of each block of a sequence."""
    seen, places = defaultdict(list), defaultdict(set)
    found = pieces(schedule, lengths, row_blocks)
    for index, (sequence, tile, split, splits, first, step, begin, end) in found.items():
        assert 0 <= split < splits <= max_splits
        assert index == first + split * step  # where its part of the workspace is
        places[sequence, tile].add((first, step))
        seen[sequence, tile].append((split, splits, begin, end))
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
    units, st.integers(1, 5), st.integers(1, 4), st.integers(1, 12), st.integers(1, 60),
    st.integers(0, 70),
)  # fmt: skip
def test_each_unit_is_in_one_piece(core, lengths, tiles, min_units, max_splits, columns, whole):
    schedule = core.SplitSchedule(
        batch=len(lengths), tiles=tiles, min_units=min_units, max_splits=max_splits,
        columns=columns, whole=whole,
    )  # fmt: skip
    check_cover(schedule, lengths, tiles, max_splits)


def test_the_first_sequences_stay_whole(core):
    """But for those that are longer than others: no piece is longer than a quarter more than the
    mean."""
    lengths = [64] * 40 + [640] + [10] * 8 + [64] * 15
    schedule = core.SplitSchedule(batch=64, tiles=8, min_units=2, columns=3 * 64, whole=49)
    splits = splits_of(schedule, lengths)
    assert splits[:40] == [1] * 40
    assert splits[40] == -(-640 // (67 + 67 // 4))
    assert set(splits[49:]) == {3}


@pytest.mark.parametrize(
    ("batch", "whole", "each"),
    [(49, 0, 1), (50, 49, 4), (63, 49, 3), (64, 49, 3), (75, 49, 2), (98, 98, 1), (128, 98, 3)],
)
def test_what_is_left_is_cut_where_its_last_round_is_full(core, batch, whole, each):
    assert core.whole_sequences(batch, 1, 49) == whole
    assert core.pieces_of_rest(batch % 49, 49) == each


@pytest.mark.parametrize(
    ("batch", "row_blocks", "whole"), [(24, 2, 0), (25, 2, 24), (50, 2, 49), (13, 4, 12)]
)
def test_each_row_block_of_a_whole_sequence_takes_a_place(core, batch, row_blocks, whole):
    assert core.whole_sequences(batch, row_blocks, 49) == whole


def test_sequences_of_several_row_blocks_stay_whole(core):
    """But for those whose row blocks take longer than the mean of all row blocks."""
    lengths = [64] * 5 + [120] + [64] * 24
    schedule = core.SplitSchedule(
        batch=30, tiles=8, min_units=2, columns=60 * core.pieces_of_rest(60 % 49, 49),
        all_row_blocks=62, whole=core.whole_sequences(30, 2, 49), alike=60,
    )  # fmt: skip
    found = pieces(schedule, lengths, [*[2] * 30, 0, 0]).values()
    splits = {sequence: splits for sequence, _, _, splits, *_ in found}
    assert [splits[b] for b in range(30)] == [1] * 5 + [2] + [1] * 18 + [4] * 6


def planned(core, batch, tiles, reads_only=True):
    columns, extra, whole, blocks_per_sm = core.plan_columns(batch, 1, tiles, reads_only)
    schedule = core.SplitSchedule(
        batch=batch, tiles=tiles, min_units=2, columns=columns, extra=extra, whole=whole
    )
    return schedule, blocks_per_sm


@pytest.mark.parametrize(
    ("batch", "tiles", "splits", "blocks_per_sm"),
    [
        (4, 8, [8] * 4, 2),
        (8, 8, [4] * 8, 2),
        (16, 8, [2] * 16, 2),
        (32, 1, [8] * 32, 2),
        (32, 8, [1] * 32, 2),
        (16, 32, [1] * 12 + [3] * 4, 0),
        (64, 8, [1] * 49 + [3] * 15, 0),
        (75, 8, [1] * 49 + [2] * 26, 0),
        (128, 8, [1] * 98 + [3] * 30, 0),
    ],
)
def test_the_plan_of_a_batch_of_one_length(core, batch, tiles, splits, blocks_per_sm):
    """That it is one is known on the device alone."""
    schedule, places = planned(core, batch, tiles)
    assert splits_of(schedule, [128] * batch) == splits
    assert places == blocks_per_sm


def test_what_computes_takes_all_places(core):
    schedule, places = planned(core, 16, 8, reads_only=False)
    assert splits_of(schedule, [128] * 16) == [3] * 16
    assert places == 0


@pytest.mark.parametrize("reads_only", [False, True])
@pytest.mark.parametrize("tiles", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("batch", [2, 3, 5, 8, 16, 31, 33, 49, 50, 64, 100, 128, 150])
def test_few_thread_blocks_are_left_over(core, batch, tiles, reads_only):
    """Each of them searches: no more than the GPU holds."""
    schedule, _ = planned(core, batch, tiles, reads_only)
    surplus = schedule.num_columns() - sum(splits_of(schedule, [1024] * batch))
    assert surplus * tiles <= 396


@pytest.mark.parametrize("long", [0, 40, 63])
def test_one_sequence_that_is_most_of_the_batch(core, long):
    """It is cut into enough pieces wherever it is; the others are whole."""
    lengths = [8] * 64
    lengths[long] = 2048
    splits = splits_of(planned(core, 64, 8)[0], lengths)
    assert 33 <= splits[long] <= 50
    assert sum(splits) == 63 + splits[long]


@settings(deadline=None)
@given(packed, of_none, st.integers(1, 60), st.integers(0, 30))
def test_rows_of_no_sequence_keep_their_columns(core, sizes, of_none, columns, extra):
    lengths, row_blocks = ([size[i] for size in sizes] for i in range(2))
    row_blocks += of_none
    schedule = core.SplitSchedule(
        batch=len(sizes), tiles=1, min_units=2, columns=columns, extra=extra,
        all_row_blocks=sum(row_blocks),
    )  # fmt: skip
    check_cover(schedule, [*lengths, 0, 0], 1, 1 << 30, row_blocks)


@settings(deadline=None)
@given(units, st.integers(1, 12))
def test_the_plan_of_any_lengths(core, lengths, tiles):
    schedule, _ = planned(core, len(lengths), tiles)
    check_cover(schedule, lengths, tiles, 1 << 30)


@settings(deadline=None)
@given(units, st.integers(1, 60), st.integers(0, 60), st.integers(0, 70))
def test_pieces_fit_into_few_columns_more(core, lengths, columns, extra, whole):
    """However they are to be cut."""
    schedule = core.SplitSchedule(
        batch=len(lengths), tiles=1, min_units=2, columns=columns, extra=extra, whole=whole
    )
    assert schedule.num_columns() == len(lengths) + extra
    check_cover(schedule, lengths, 1, 1 << 30)


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 400),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 60),
)
def test_equal_lengths_need_no_search(core, batch, length, tiles, max_splits, columns):
    searched, computed = (
        core.SplitSchedule(
            batch=batch, tiles=tiles, equal=equal, max_splits=max_splits, columns=columns
        )
        for equal in (False, True)
    )
    assert pieces(computed, [length] * batch) == pieces(searched, [length] * batch)


# ---- packed batches: row blocks have columns of their own ----------------------------------------


@settings(deadline=None)
@given(
    packed, of_none, st.integers(1, 3), st.sampled_from([1, 2, 12]), st.integers(1, 60),
    st.integers(0, 9),
)  # fmt: skip
def test_each_row_block_is_cut_like_a_sequence(
    core, sizes, of_none, tiles, max_splits, columns, surplus
):
    """Those of the rows that belong to no sequence come last, and have no keys."""
    lengths, row_blocks = ([size[i] for size in sizes] for i in range(2))
    row_blocks += of_none
    schedule = core.SplitSchedule(
        batch=len(sizes), tiles=tiles, min_units=2, max_splits=max_splits, columns=columns,
        all_row_blocks=sum(row_blocks) + surplus,
    )  # fmt: skip
    check_cover(schedule, [*lengths, 0, 0], tiles, max_splits, row_blocks)
    splits = {(piece[0], piece[3]) for piece in pieces(schedule, lengths, row_blocks).values()}
    assert len(splits) == sum(n > 0 for n in row_blocks)  # all of a sequence alike


def test_row_blocks_that_read_the_same_keys_lie_side_by_side(core):
    schedule = core.SplitSchedule(batch=2, tiles=2, columns=8, all_row_blocks=6)
    found = pieces(schedule, [6, 6], [3, 1, 0, 1])
    assert [piece[:3] for _, piece in sorted(found.items())] == [
        *((0, tile, split) for split in range(2) for tile in range(6)),
        *((1, tile, split) for split in range(2) for tile in range(2)),
        (3, 0, 0),
        (3, 1, 0),
    ]


@settings(deadline=None)
@given(packed, of_none, st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 5, 2**30]))
def test_a_tile_has_all_its_pieces_or_none(
    core, sizes, of_none, columns, all_row_blocks, max_splits
):
    """Where sequences have more row blocks than there are rows for, which is wrong."""
    lengths, row_blocks = ([size[i] for size in sizes] for i in range(2))
    row_blocks += of_none
    schedule = core.SplitSchedule(
        batch=len(sizes), tiles=1, columns=columns, max_splits=max_splits,
        all_row_blocks=all_row_blocks,
    )  # fmt: skip
    counts = defaultdict(list)
    for sequence, tile, split, splits, *_ in pieces(schedule, lengths, row_blocks).values():
        counts[sequence, tile, splits].append(split)
        assert tile < row_blocks[sequence]
    assert all(sorted(found) == list(range(splits)) for (*_, splits), found in counts.items())


def test_more_row_blocks_than_can_be_added_up(core):
    """Of a wrong length: nobody has them, and those of the others have their places."""
    schedule = core.SplitSchedule(batch=3, tiles=1, columns=3, max_splits=7, all_row_blocks=2**28)
    sizes = [9, 9, 9], [1, 2**27, 1, 0, 0]
    splits = schedule.piece(sizes[0], 0, sizes[1])[3]
    assert schedule.piece(sizes[0], splits, sizes[1]) is None
    assert schedule.piece(sizes[0], splits + 2**24, sizes[1])[:3] == (2, 0, 0)


def test_more_columns_than_an_int_counts(core):
    """Of wrong lengths: 2^32 of them are too few by two pieces of each row block of the first."""
    many = 2**20
    schedule = core.SplitSchedule(
        batch=4095, tiles=1, columns=4 * many, extra=many, all_row_blocks=many
    )
    sizes = [100] + [0] * 4094, [many] * 4095 + [0, 0]
    assert schedule.piece(sizes[0], 0, sizes[1])[:4] == (0, 0, 0, 1)


# ---- the length of a piece ----------------------------------------------------------------------


def shortest_chunk(lengths, columns, min_units=2) -> int:
    return max(min_units, -(-sum(lengths) // columns))


@settings(deadline=None)
@given(units, st.integers(1, 60))
def test_pieces_that_fit_are_not_lengthened(core, lengths, columns):
    schedule = core.SplitSchedule(batch=len(lengths), tiles=1, min_units=2, columns=columns)
    chunk = shortest_chunk(lengths, columns)
    shortest = [max(1, -(-n // chunk)) for n in lengths]
    splits = splits_of(schedule, lengths)
    if sum(shortest) <= max(columns, len(lengths)):
        assert splits == shortest
    else:
        assert all(few <= many for few, many in zip(splits, shortest, strict=True))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 400), st.integers(1, 12), st.booleans())
def test_a_batch_of_one_length_fits(core, batch, length, each, equal):
    schedule = core.SplitSchedule(
        batch=batch, tiles=1, equal=equal, min_units=1, columns=each * batch
    )
    splits = splits_of(schedule, [length] * batch)
    assert set(splits) == {max(1, -(-length // max(1, -(-length // each))))}
    assert splits[0] <= each


@settings(deadline=None)
@given(units, st.integers(1, 60))
def test_pieces_are_lengthened_within_bounds(core, lengths, columns):
    """By a quarter, or each time in proportion to how many are too many, which are no more than
    sequences."""
    schedule = core.SplitSchedule(batch=len(lengths), tiles=1, min_units=2, columns=columns)
    longest = max(end - begin for *_, begin, end in pieces(schedule, lengths).values())
    surplus = len(lengths) / max(columns, len(lengths))
    growth = max(1.25, 1 + surplus + surplus**2 + surplus**3)
    assert longest <= shortest_chunk(lengths, columns) * growth + 3


@pytest.mark.parametrize(
    ("lengths", "columns", "splits"),
    [
        ([100, 20, 20, 20], 16, [10, 2, 2, 2]),  # 10 units each, and 16 pieces
        ([100, 25, 25, 10], 16, [8, 2, 2, 1]),  # 17 of 10, and 13 of 13, a quarter longer
        ([90, 1, 1, 1, 1, 1, 1, 1], 9, [9, 1, 1, 1, 1, 1, 1, 1]),  # 16 of 11: 17 are there
    ],
)
def test_lengthening(core, lengths, columns, splits):
    schedule = core.SplitSchedule(batch=len(lengths), tiles=1, min_units=2, columns=columns)
    assert splits_of(schedule, lengths) == splits


@pytest.mark.parametrize(
    ("lengths", "splits"),
    [
        ([100, 110, 90, 95], [1, 1, 1, 1]),  # none is longer than the mean and a quarter
        ([160, 40, 120, 80], [2, 1, 2, 1]),  # of 100, with what columns are left
        ([300, 40, 130, 130], [2, 1, 1, 1]),  # 150 is the mean, and 8 pieces of it too many
    ],
)
def test_lengths_that_differ_use_what_columns_there_are(core, lengths, splits):
    schedule = core.SplitSchedule(batch=4, tiles=1, min_units=2, columns=4, extra=2)
    assert splits_of(schedule, lengths) == splits


@pytest.mark.parametrize("columns", [1, 8, 49])
def test_the_workspace_does_not_grow_with_the_capacity(core, columns):
    schedule = core.SplitSchedule(batch=7, tiles=8, columns=columns)
    assert schedule.num_columns() == 7 + columns


def test_without_splits_nothing_is_read(core):
    schedule = core.SplitSchedule(batch=3, tiles=2, max_splits=1, columns=100)
    assert schedule.num_pieces() == 6
    assert [schedule.piece([5, 0, 9], n)[:4] for n in range(6)] == [
        (b, tile, 0, 1) for b in range(3) for tile in range(2)
    ]


def test_a_limit_is_used_in_full(core):
    schedule = core.SplitSchedule(batch=3, tiles=1, max_splits=4, columns=2**31 - 1)
    assert splits_of(schedule, [3, 0, 50]) == [3, 1, 4]


def test_huge_batches_and_lengths(core):
    """Products beyond 32 bits, and beyond 53."""
    longest, batch, tiles = 2**30, 3000, 70_000
    lengths = [longest] * batch
    schedule = core.SplitSchedule(batch=batch, tiles=tiles, columns=9000)
    for column in (0, 17, 8999):
        sequence, tile, split, splits, first, step, begin, end = schedule.piece(
            lengths, column * tiles + tiles - 1
        )
        assert (sequence, tile, split, splits) == (column // 3, tiles - 1, column % 3, 3)
        assert first + split * step == column * tiles + tiles - 1
        assert (begin, end) == (
            longest * split // 3 + (split > 0), longest * (split + 1) // 3 + (split < 2)
        )  # fmt: skip
    assert schedule.piece(lengths, 9000 * tiles) is None
    one = core.SplitSchedule(batch=batch, tiles=1, columns=1)
    assert splits_of(one, lengths) == [1] * batch


# ---- how many pieces are wanted -----------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([8, 108, 132]), st.integers(1, 3))
def test_fewest_columns_occupy_every_multiprocessor_alike(
    core, batch, tiles, sm_count, blocks_per_sm
):
    columns = core.fewest_columns(batch, tiles, sm_count, blocks_per_sm)
    assert columns % batch == 0

    def occupied(blocks: int) -> float:
        """The share of places that pieces fill, `blocks` to a multiprocessor."""
        return blocks * sm_count // tiles // batch * batch * tiles / (blocks * sm_count)

    enough = [n for n in range(1, blocks_per_sm + 1) if occupied(n) >= 0.9 - 1e-12]
    assert columns == (enough[0] * sm_count // tiles // batch * batch if enough else 0)


@pytest.mark.parametrize(
    ("batch", "tiles", "columns"),
    [
        (1, 8, 16),
        (8, 8, 16),
        (16, 8, 16),
        (1, 1, 132),
        (3, 8, 15),
        (5, 8, 15),
        (7, 8, 49),
        (64, 8, 0),
    ],
)
def test_fewest_columns(core, batch, tiles, columns):
    assert core.fewest_columns(batch, tiles, sm_count=132, blocks_per_sm=3) == columns


@given(st.integers(1, 3000), st.integers(1, 400))
def test_whole_pieces_of_each_sequence_fill_the_gpu(core, batch, resident):
    columns = core.wanted_columns(batch, resident)
    if batch > 4 * resident:
        assert columns == resident
        return
    whole = [n * resident // batch * batch for n in range(1, 5)]
    used = [columns / (n * resident) for n, columns in enumerate(whole, start=1)]
    n = whole.index(columns)
    # No fewer rounds would have done, and if these do not either, none are better.
    assert all(other < 0.9 and other < used[n] for other in used[:n])
    assert used[n] >= 0.9 or used[n] == max(used)


@pytest.mark.parametrize(
    ("batch", "resident", "columns"),
    [
        (1, 49, 49),
        (8, 49, 48),
        (16, 49, 48),
        (26, 49, 182),
        (32, 49, 96),
        (49, 49, 49),
        (64, 49, 192),
    ],
)
def test_wanted_columns(core, batch, resident, columns):
    assert core.wanted_columns(batch, resident) == columns
