"""What a row block of Hopper's forward costs: how many tiles of keys it goes through."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .test_mask import visible

WIDTHS = st.one_of(st.just(-1), st.integers(0, 400))


def all_steps(left, right, seqlen_q, seqlen_k, block_m, block_n):
    """Of each row block, counted key by key."""
    steps = []
    for row in range(0, seqlen_q, block_m):
        rows = range(row, min(row + block_m, seqlen_q))
        seen = (visible(left, right, seqlen_q, seqlen_k, i) for i in rows)
        steps.append(len({key // block_n for keys in seen for key in keys}))
    return steps


def mean_steps(core, left, right, seqlen_q, seqlen_k, block_m, block_n):
    mask = core.SequenceMask(left=left, right=right, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return mask.mean_steps(seqlen_q=seqlen_q, block_m=block_m, block_n=block_n)


@settings(deadline=None)
@given(
    left=WIDTHS, right=WIDTHS, seqlen_q=st.integers(1, 500), seqlen_k=st.integers(0, 600),
    block_m=st.sampled_from([64, 128, 192]), block_n=st.sampled_from([64, 80, 112, 176]),
)  # fmt: skip
def test_of_few_row_blocks_all_count(core, left, right, seqlen_q, seqlen_k, block_m, block_n):
    case = left, right, seqlen_q, seqlen_k, block_m, block_n
    steps = all_steps(*case)
    assert mean_steps(core, *case) == sum(steps) / len(steps)


@pytest.mark.parametrize("left", [-1, 0, 100, 1000])
@pytest.mark.parametrize("right", [-1, 0, 300])
def test_of_many_some_do(core, left, right):
    """Which a step decides on average, and the sequence's ends."""
    for seqlen, block_n in itertools.product([1100, 1536, 2000], [96, 128]):
        case = left, right, seqlen, seqlen, 64, block_n
        steps = all_steps(*case)
        assert mean_steps(core, *case) == pytest.approx(sum(steps) / len(steps), abs=0.6)


def test_without_rows(core):
    assert mean_steps(core, -1, 0, 0, 100, 128, 128) == 0


def test_long_sequences(core):
    """No sum passes the range of an int."""
    many = 2**29
    assert mean_steps(core, -1, -1, many, many, 128, 128) == many / 128
    assert mean_steps(core, -1, 0, many, many, 128, 128) == pytest.approx(many / 256, rel=1e-3)


@pytest.mark.parametrize(
    ("steps", "tile", "keys", "from_registers"),
    [
        (0, (128, 128, 128, 128, 2), 156, 0),
        (4, (128, 128, 128, 176, 2), 5 * 204, 64),
        (5, (192, 192, 128, 96, 2), 6 * 124, 64),
        (5, (192, 192, 128, 112, 2), 6 * 140, 192),
        (5.5, (256, 256, 128, 64, 2), 6.5 * 92, 128),
        (1, (256, 256, 128, 80, 2), 2 * 108, 256),
        (1, (96, 96, 192, 96, 3), 2 * 124, 96),  # no runs of 64
        (1, (192, 128, 128, 128, 2), 2 * 156, 64),
        (1, (64, 64, 192, 128, 3), 2 * 156, 0),
    ],
)
def test_cost(core, steps, tile, keys, from_registers):
    """With what columns of O take that have no room in shared memory."""
    assert core.row_block_cost(steps, *tile) == keys + from_registers / 4
