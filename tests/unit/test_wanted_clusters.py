"""When clusters of thread blocks share pieces, of how many blocks, and what is left for each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROWS = 8  # of a tile, that are worth a cluster


@pytest.mark.parametrize(
    ("rows", "units", "pieces", "blocks"),
    [
        (16, 128, 2, 2),  # 16 x 8k keys, 4 queries of 4 heads
        (16, 128, 8, 8),  # 32 x 8k keys, 16 heads on one
        (16, 33, 33, 16),  # a draft's window of 2,048 keys
        (16, 512, 16, 16),  # 4 queries of 32k keys
        (4, 512, 16, 1),  # one of them
        (4, 32, 4, 1),  # 8 x 2k keys
        (8, 128, 3, 2),
        (7, 128, 16, 1),
        (8, 128, 1, 1),
        (8, 1, 16, 1),
        (8, 3, 16, 2),
        (8, 0, 16, 1),
        (16, 1 << 24, 132, 16),
    ],
)
def test_the_rule(core, rows, units, pieces, blocks):
    assert 1 << core.wanted_cluster_log2(rows, units, pieces) == blocks


@given(st.integers(1, 16), st.integers(0, 1 << 25), st.integers(0, 400))
def test_a_cluster_is_no_larger_than_its_work(core, rows, units, pieces):
    blocks = 1 << core.wanted_cluster_log2(rows, units, pieces)
    assert blocks in (1, 2, 4, 8, 16)
    assert blocks == 1 or (rows >= ROWS and blocks <= pieces and 2 * (blocks - 1) < units)


@pytest.mark.parametrize(
    ("batch", "tiles", "log2", "one_length", "columns", "extra"),
    [
        (16, 8, 1, False, 16, 8),  # three blocks an SM hold 24 columns
        (32, 1, 3, False, 32, 17),
        (1, 8, 4, True, 1, 0),
        (2, 2, 4, True, 4, 2),  # two clusters for each tile occupy all SMs
    ],
)
def test_columns_of_clusters(core, batch, tiles, log2, one_length, columns, extra):
    assert core.plan_of_clusters(batch, tiles, log2, one_length) == (columns, extra, 0, 0)


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_what_is_left_over_has_places(core, batch, tiles, log2):
    """Beside the others, or nothing is left over at all."""
    columns, extra, whole, _ = core.plan_of_clusters(batch, tiles, log2, False)
    places = 3 * 132 // (tiles << log2)
    if whole == 0 and columns <= places:
        assert columns <= batch + extra <= max(places, columns)


@given(st.integers(0, 50), st.integers(0, 400), st.integers(1, 16))
def test_even_shares(core, begin, units, parts):
    shares = [core.even_share(begin, begin + units, part, parts) for part in range(parts)]
    assert [unit for first, end in shares for unit in range(first, end)] == list(
        range(begin, begin + units)
    )
    sizes = [end - first for first, end in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
