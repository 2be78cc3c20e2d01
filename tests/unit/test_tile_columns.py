"""The order of tiles: what comes from memory, by a model of takers in step and an L2 of columns."""

from collections import OrderedDict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

MiB = 1 << 20
H200_L2 = 50 * MiB
H200_SMS = 132


def times_read(core, group, *, l2_bytes, places, count, bytes, sharing, tiles, **_):
    """How often a column's bytes come from memory, on average: `places` tiles at a time, in their
    order, each of which reads its column whole; L2 forgets what was wanted the longest ago."""
    order = core.DenseSchedule(m_blocks=tiles, heads=count, batch=1, group=group)
    columns = [head // sharing for _, head, _ in order.tiles(block=0, num_blocks=1)]
    kept = OrderedDict()
    reads = 0
    for first in range(0, len(columns), places):
        for column in dict.fromkeys(columns[first : first + places]):
            reads += column not in kept
            kept[column] = None
            kept.move_to_end(column)
            while len(kept) * bytes > l2_bytes:
                kept.popitem(last=False)
    return reads / (count / sharing)


@st.composite
def launches(draw):
    places = draw(st.sampled_from((4, 66, 108, 132)))
    sharing = draw(st.sampled_from((1, 1, 4, 5, 7, 8)))
    return {
        "l2_bytes": draw(st.sampled_from((6 * MiB, 40 * MiB, H200_L2))),
        "places": places,
        "sharers": draw(st.sampled_from((4, 8))),
        "count": sharing * draw(st.integers(1, 96)),
        "bytes": draw(st.sampled_from((MiB // 4, MiB, 2 * MiB, 5 * MiB))),
        "sharing": sharing,
        "tiles": draw(st.integers(1, 48)),
        "equal_tiles": draw(st.booleans()),
        "few": draw(st.sampled_from(((0, 0), (4, 2), (8, 1)))),
    }


# Groups of three columns of the four that read the same, of which L2 holds one.
THREE_OF_FOUR = {
    "l2_bytes": 6 * MiB, "places": 4, "sharers": 8, "count": 12, "bytes": 5 * MiB, "sharing": 4,
    "tiles": 8, "equal_tiles": False, "few": (0, 0),
}  # fmt: skip
SIX_OF_FIVE = THREE_OF_FOUR | {"places": 66, "count": 40, "sharing": 5, "tiles": 48}


@settings(deadline=None, max_examples=500)
@given(launches())
@example(THREE_OF_FOUR)
@example(SIX_OF_FIVE)
def test_a_column_is_read_once_or_by_several_tiles_at_a_time(core, launch):
    group = core.columns_side_by_side(**launch)
    assert 1 <= group <= launch["count"]
    reads = times_read(core, group, **launch)
    whole, rest = divmod(group, launch["sharing"])
    if (whole + 2 * (rest > 0)) * launch["bytes"] <= launch["l2_bytes"] // 2:
        assert reads == 1
    else:  # the first and the last time perhaps with fewer
        assert reads <= launch["tiles"] / launch["sharers"] + 2


@pytest.mark.parametrize(("head_dim", "heads"), [(128, 16), (192, 10)])
def test_groups_of_few_tiles_end_with_a_round(core, head_dim, heads):
    """512 keys: nearly two rounds of four tiles."""
    seqlen, tiles = 512, 4
    launch = {
        "l2_bytes": H200_L2,
        "places": H200_SMS,
        "sharers": core.HOPPER_SHARERS,
        "count": heads * 16384 // seqlen,
        "bytes": seqlen * head_dim * 4,
        "sharing": 1,
        "equal_tiles": False,
        "few": core.FEW_FORWARD_TILES,
    }
    group = core.columns_side_by_side(**launch, tiles=tiles)
    assert group == 64
    rounds = group * tiles / H200_SMS
    assert 0.95 < rounds / round(rounds) <= 1
