"""When a tile is a cluster's of thread blocks, and of how many, on an H200."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

SMS = 132
ROWS = 8  # of a tile, that are worth a cluster


@pytest.mark.parametrize(
    ("rows", "units", "pieces", "tiles", "blocks"),
    [
        (16, 33, 33, 4, 16),  # a draft's window of 2,048 keys: 8 queries, 8 heads on 2
        (16, 33, 33, 8, 16),  # two of them
        (16, 33, 33, 9, 1),  # more have too few blocks for so many steps
        (16, 512, 16, 8, 16),  # 4 queries of 32k keys, 4 heads on each of 8
        (16, 2304, 16, 8, 1),  # of 144k keys
        (16, 1024, 16, 8, 16),
        (16, 1025, 16, 8, 1),
        (16, 512, 33, 4, 1),  # on each of 4: half of the GPU would be idle
        (16, 512, 8, 16, 8),
        (16, 512, 9, 14, 8),
        (16, 512, 10, 13, 1),
        (16, 128, 2, 128, 1),  # 16 x 8k keys, 4 queries: two blocks an SM
        (16, 128, 8, 32, 1),  # 32 x 8k keys, 16 heads on one: the same
        (4, 512, 16, 8, 1),  # one query of 32k keys
        (4, 32, 4, 64, 1),  # 8 x 2k keys
        (7, 32, 16, 8, 1),
        (8, 32, 16, 8, 16),
        (8, 128, 1, 8, 1),
        (8, 1, 16, 8, 1),
        (8, 3, 16, 8, 2),
        (8, 0, 16, 8, 1),
        (16, 64, 132, 1, 16),
        (16, 65, 132, 1, 1),
        (16, 1 << 24, 132, 1, 1),
        (16, 64, 16, 133, 1),
    ],
)
def test_the_rule(core, rows, units, pieces, tiles, blocks):
    assert 1 << core.wanted_cluster_log2(rows, units, pieces, tiles) == blocks


@given(st.integers(1, 16), st.integers(0, 1 << 25), st.integers(0, 400), st.integers(1, 400))
def test_a_cluster_is_no_larger_than_its_work_and_place(core, rows, units, pieces, tiles):
    blocks = 1 << core.wanted_cluster_log2(rows, units, pieces, tiles)
    assert blocks in (1, 2, 4, 8, 16)
    if blocks > 1:
        assert rows >= ROWS
        assert blocks <= pieces
        assert 2 * (blocks - 1) < units
        assert blocks * tiles <= SMS


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 132))
def test_a_block_of_a_cluster_has_little_to_do_or_as_much_as_without(core, units, pieces, tiles):
    blocks = 1 << core.wanted_cluster_log2(16, units, pieces, tiles)
    assert blocks == 1 or units <= 4 * blocks or pieces <= 8 * blocks / 7


@given(st.integers(0, 50), st.integers(0, 400), st.integers(1, 16))
def test_even_shares(core, begin, units, parts):
    shares = [core.even_share(begin, begin + units, part, parts) for part in range(parts)]
    assert [unit for first, end in shares for unit in range(first, end)] == list(
        range(begin, begin + units)
    )
    sizes = [end - first for first, end in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
