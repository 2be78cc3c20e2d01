"""How many multiprocessors a forward gets beside decode."""

import itertools

import pytest

SMS = 132


def blocks(core, tiles: int, keys: int, decode_keys: float) -> int:
    return core.forward_blocks(
        tile_keys=float(tiles * keys), tiles=float(tiles), decode_keys=float(decode_keys),
        rows=128, most=SMS,
    )  # fmt: skip


def test_a_chunk_beside_many_sequences(core):
    """512 queries of 32 heads, and 63 sequences of 8 KV heads, all of 4k keys: as many rounds of
    tiles as take no longer than reading."""
    assert blocks(core, 128, 4096, 63 * 8 * 4096) == 43


@pytest.mark.parametrize("decode_keys", [0, 1000])
def test_no_other_work_or_hardly_any(core, decode_keys):
    assert blocks(core, 128, 4096, decode_keys) > SMS * 3 // 4


def test_no_tiles(core):
    """A replayed graph whose chunk is gone: its surplus tiles still want a CTA."""
    assert blocks(core, 0, 4096, 10**6) == SMS // 8 + 1


def test_more_to_do_takes_more(core):
    taken = [blocks(core, tiles, 4096, 63 * 8 * 4096) for tiles in range(0, 4000, 50)]
    assert all(1 <= n <= SMS for n in taken)
    # Rounds are whole, so that a few tiles more may want fewer multiprocessors.
    assert all(after >= 0.5 * before for before, after in itertools.pairwise(taken))
    assert taken[-1] > 100
