"""The boxes that a tile of keys is loaded in, out of large pages: each key once, no two pages."""

import pytest

TILE = 176
SIZES = (128, 64, 32, 16)
INT_MAX = 2**31 - 1


def check_tile(core, position: int, left: int, page_size: int) -> None:
    boxes = core.page_boxes(position=position, left=left, tile_keys=TILE, page_size=page_size)
    assert len(boxes) == 32
    covered = []
    for lane, (first, size, keys) in enumerate(boxes):
        if size == 0:
            assert keys == 0
            continue
        assert size == SIZES[lane % 4]  # the map of its lane
        assert first % 8 == 0  # where the swizzle repeats
        covered += range(first, first + size)
        assert keys == min(size, left - first)
        if keys > 0:  # of the sequence: one page's
            begin = position + first
            assert begin // page_size == (begin + keys - 1) // page_size
        if 0 < keys < size:
            assert keys < 16  # whole boxes have all keys but the last few
            assert size == min(s for f, s, _ in boxes if s and f >= first)  # fewest eights
    assert sorted(covered) == list(range(TILE))


@pytest.mark.parametrize("page_size", [64, 80, 96, 112, 128, 144, 176, 192, 240, 256, 1040])
def test_boxes_have_each_key_once(core, page_size):
    """Tiles until places in a page repeat, and ends of a sequence in a tile or behind it."""
    assert core.suit_page_boxes(page_size)
    for position in range(0, page_size // 16 * TILE, TILE):
        for left in (-TILE, 1000, *range(position // TILE % 5 - 1, TILE + 2, 5)):
            check_tile(core, position, left, page_size)


@pytest.mark.parametrize("page_size", [16, 32, 48, 56, 63, 65, 72, 100, 136, INT_MAX, 2**30])
def test_pages_that_they_do_not_suit(core, page_size):
    assert not core.suit_page_boxes(page_size)


@pytest.mark.parametrize("page_size", [2**28, 306783376])
def test_the_largest_pages(core, page_size):
    """Several of them are no int."""
    assert core.suit_page_boxes(page_size)
    for position in range(page_size // TILE * TILE - 2 * TILE, page_size + 2 * TILE, TILE):
        if position % 16 == 0:
            check_tile(core, position, 1000, page_size)
    check_tile(core, 2**31 - 2**31 % TILE - 2 * TILE, 1000, page_size)
