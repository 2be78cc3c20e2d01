"""Key limits per row against the definition of causal and window masks, entry by entry."""

import itertools

import pytest

LENGTHS = [0, 1, 2, 3, 5, 8]
WINDOWS = [-1, 0, 1, 2, 3, 8, 20]


def visible(left, right, seqlen_q, seqlen_k, row):
    """Keys that the row sees: bottom-right alignment, -1 is unbounded, causal is right = 0."""
    diagonal = row + seqlen_k - seqlen_q
    return [
        key
        for key in range(seqlen_k)
        if (left < 0 or key >= diagonal - left) and (right < 0 or key <= diagonal + right)
    ]


def limits(core, left, right, seqlen_q, seqlen_k):
    mask = core.SequenceMask(left=left, right=right, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return [mask.limits(row) for row in range(seqlen_q)]


@pytest.mark.parametrize("left", WINDOWS)
@pytest.mark.parametrize("right", WINDOWS)
def test_limits(core, left, right):
    for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
        for row, (begin, end) in enumerate(limits(core, left, right, seqlen_q, seqlen_k)):
            expected = visible(left, right, seqlen_q, seqlen_k, row)
            assert begin >= 0
            assert end <= seqlen_k
            assert list(range(begin, end)) == expected


@pytest.mark.parametrize("left", WINDOWS)
@pytest.mark.parametrize("right", WINDOWS)
def test_limits_grow_with_the_row(core, left, right):
    """What block_range relies on: only the first and the last row of a block matter."""
    for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
        rows = limits(core, left, right, seqlen_q, seqlen_k)
        for (begin, end), (next_begin, next_end) in itertools.pairwise(rows):
            assert begin <= next_begin
            assert end <= next_end


def test_long_sequences(core):
    """Lengths and windows of 2^29: no sum passes the range of an int."""
    seqlen = 2**29
    mask = core.SequenceMask(left=seqlen - 1, right=0, seqlen_q=seqlen, seqlen_k=seqlen)
    assert mask.limits(0) == (0, 1)
    assert mask.limits(seqlen - 1) == (0, seqlen)
    mask = core.SequenceMask(left=1, right=0, seqlen_q=1, seqlen_k=seqlen)
    assert mask.limits(0) == (seqlen - 2, seqlen)
    mask = core.SequenceMask(left=1, right=0, seqlen_q=seqlen, seqlen_k=1)
    assert mask.limits(seqlen - 1) == (0, 1)
    begin, end = mask.limits(0)
    assert end <= begin


def test_fragment_bits(core):
    """Of a thread's keys 0, 1, 8, 9, 16, …, 121, one bit each."""
    keys = [n % 2 + n // 2 * 8 for n in range(32)]
    limits = [-(2**30), -9, *range(-2, 132), 2**30]
    for begin, end in itertools.product(limits, limits):
        expected = sum(1 << n for n, key in enumerate(keys) if begin <= key < end)
        assert core.fragment_bits(begin, end) == expected
