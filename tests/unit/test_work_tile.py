"""Row blocks of a sequence, and the order of the tiles of a rectangle."""

import itertools

import pytest

INT_MAX = 2**31 - 1
SHAPES = list(itertools.product([1, 2, 3, 5], [1, 2, 3, 7, 8]))
ORDERS = list(itertools.product([1, 2, 3, 4, 7, 20], [False, True]))


def walk(core, m_blocks, strips, group, longest_first):
    return [
        core.tile_at(
            group=group,
            longest_first=longest_first,
            index=index,
            m_blocks=m_blocks,
            strips=strips,
        )
        for index in range(m_blocks * strips)
    ]


@pytest.mark.parametrize("block_m", [1, 16, 64, 80, 128, 192])
def test_num_blocks_rounds_up(core, block_m):
    lengths = [*range(400), 2**16, INT_MAX - block_m, INT_MAX - 1, INT_MAX]
    for seqlen_q in lengths:
        assert core.num_blocks(seqlen_q, block_m) == -(-seqlen_q // block_m)


@pytest.mark.parametrize(("group", "longest_first"), ORDERS)
def test_order_has_each_tile_once(core, group, longest_first):
    for m_blocks, strips in SHAPES:
        tiles = walk(core, m_blocks, strips, group, longest_first)
        assert sorted(tiles) == list(itertools.product(range(m_blocks), range(strips)))


@pytest.mark.parametrize(("group", "longest_first"), ORDERS)
def test_order_finishes_a_group_before_the_next(core, group, longest_first):
    for m_blocks, strips in SHAPES:
        tiles = walk(core, m_blocks, strips, group, longest_first)
        groups = [strip // group for _, strip in tiles]
        assert groups == sorted(groups)


@pytest.mark.parametrize(("group", "longest_first"), ORDERS)
def test_order_inside_a_group(core, group, longest_first):
    for m_blocks, strips in SHAPES:
        tiles = walk(core, m_blocks, strips, group, longest_first)
        for _, in_group in itertools.groupby(tiles, key=lambda tile: tile[1] // group):
            rows = [m_block for m_block, _ in in_group]
            assert rows == sorted(rows, reverse=longest_first)


def test_one_strip_at_a_time(core):
    tiles = walk(core, m_blocks=3, strips=2, group=1, longest_first=True)
    assert tiles == [(2, 0), (1, 0), (0, 0), (2, 1), (1, 1), (0, 1)]


def test_the_last_group_is_narrower(core):
    tiles = walk(core, m_blocks=2, strips=3, group=2, longest_first=False)
    assert tiles == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("group", [1, 1000, INT_MAX])
def test_order_of_more_tiles_than_32_bits_count(core, group):
    m_blocks, strips = 2**20, 5 * 10**9
    last = m_blocks * strips - 1
    tile = core.tile_at(
        group=group, longest_first=False, index=last, m_blocks=m_blocks, strips=strips
    )
    assert tile == (m_blocks - 1, strips - 1)
