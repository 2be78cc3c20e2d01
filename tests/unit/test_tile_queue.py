"""Blocks of a persistent grid work on each tile once, and leave the counter as they found it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from .launch_model import Counter


def run(queue, num_tiles: int, num_blocks: int, counter: Counter, order) -> list[list[int]]:
    """Tiles by block; `order` picks the block that is next to finish a tile."""
    how = dict(num_blocks=num_blocks, take=counter.take)
    at = dict.fromkeys(range(num_blocks))  # None: not begun
    done = [[] for _ in range(num_blocks)]
    while at:
        block = order(sorted(at))
        if at[block] is None:
            at[block] = queue.first(block=block, **how)
        else:
            done[block].append(at[block])
            at[block] = queue.next(**how)
        if at[block] >= num_tiles:
            del at[block]
    return done


@settings(deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 20),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_each_tile_once(core, num_tiles, num_blocks, draws_first, random):
    num_blocks = min(num_blocks, num_tiles)
    draws = draws_first or num_tiles > num_blocks
    queue = core.TileQueue(num_tiles=num_tiles, draws=draws, draws_first=draws_first)
    counter = Counter()
    for _launch in range(2):
        done = run(queue, num_tiles, num_blocks, counter, random.choice)
        assert sorted(tile for tiles in done for tile in tiles) == list(range(num_tiles))
        assert counter.value == 0


def test_faster_blocks_have_more_tiles(core):
    """Block 0 takes ten times as long for a tile as the others."""
    queue = core.TileQueue(num_tiles=100, draws=True)
    turns = iter([0, *[1, 2, 3] * 10] * 100)
    done = run(queue, 100, 4, Counter(), lambda left: next(t for t in turns if t in left))
    assert len(done[0]) < len(done[1]) // 5


def test_a_cta_that_has_not_begun_has_no_tile(core):
    """So that no CTA waits in vain for a tile before its own."""
    queue = core.TileQueue(num_tiles=20, draws=True, draws_first=True)
    done = run(queue, 20, 4, Counter(), max)  # one after the other, the last first
    assert done == [[], [], [], list(range(20))]
