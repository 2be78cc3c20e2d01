"""Windows, lengths and tiles for tests of ranges: all short ones, and any."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

WINDOWS = st.one_of(st.just(-1), st.just(0), st.integers(0, 120))
LENGTHS, BLOCKS = st.integers(0, 100), st.integers(1, 40)

#: of left, right, seqlen_q, seqlen_k, block_m, block_n
any_lengths = given(WINDOWS, WINDOWS, LENGTHS, LENGTHS, BLOCKS, BLOCKS)


def short_windows(test):
    """With small windows left and right, in tiles of few rows and keys."""
    for names, values in (
        ("right", [-1, 0, 1, 2, 5]),
        ("left", [-1, 0, 1, 2, 5]),
        (("block_m", "block_n"), [(1, 1), (2, 3), (3, 2), (4, 4)]),
    ):
        test = pytest.mark.parametrize(names, values)(test)
    return test


def of_all_lengths(check):
    """Two tests of check(core, left, right, seqlen_q, seqlen_k, block_m, block_n): of all short
    sequences, and of any."""

    @short_windows
    def of_short_sequences(core, left, right, block_m, block_n):
        for seqlen_q, seqlen_k in itertools.product(range(8), range(8)):
            check(core, left, right, seqlen_q, seqlen_k, block_m, block_n)

    @settings(deadline=None, max_examples=300)
    @any_lengths
    def of_any_lengths(core, left, right, seqlen_q, seqlen_k, block_m, block_n):
        check(core, left, right, seqlen_q, seqlen_k, block_m, block_n)

    return of_short_sequences, of_any_lengths
