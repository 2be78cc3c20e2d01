"""Pages of any size: division by multiplication, and 64-bit offsets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

INT_MAX = 2**31 - 1
POWERS = [2**e for e in range(31)]
DIVISORS = sorted({*range(1, 300), *POWERS, *(p - 1 for p in POWERS[1:]), *(p + 1 for p in POWERS),
                   3**19, 641, 10**9, INT_MAX - 1, INT_MAX})  # fmt: skip


@pytest.fixture(params=[1, 2, 3, 7, 16, 100, 128, 256, 1000])
def page_size(request):
    return request.param


def test_fast_division_at_every_edge(core):
    """Where the quotient steps, and at both ends of the range."""
    for divisor in DIVISORS:
        divide = core.FastDiv(divisor)
        last = INT_MAX // divisor
        for multiple in {0, 1, 2, 3, last // 2, last - 1, last}:
            for n in range(multiple * divisor - 2, multiple * divisor + 3):
                if 0 <= n <= INT_MAX:
                    assert divide.divmod(n) == divmod(n, divisor)
        assert divide.divmod(INT_MAX) == divmod(INT_MAX, divisor)


@given(st.integers(0, INT_MAX), st.integers(1, INT_MAX))
def test_fast_division(core, n, divisor):
    assert core.FastDiv(divisor).divmod(n) == divmod(n, divisor)


def test_slots_walk_the_pages(core, page_size):
    keys = 3 * page_size + 2
    walked = [core.page_slot(page_size, key) for key in range(keys)]
    assert walked == [divmod(key, page_size) for key in range(keys)]


def test_offsets(core, page_size):
    """Pages in any order, one of them used twice, one of them missing."""
    block_table = [4, 0, -1, 9, 4]
    page_stride, row_stride = 5 * page_size * 24, 24
    for key in range(len(block_table) * page_size):
        page = block_table[key // page_size]
        expected = page * page_stride + key % page_size * row_stride if page >= 0 else None
        offset = core.paged_offset(
            block_table=block_table,
            page_size=page_size,
            page_stride=page_stride,
            row_stride=row_stride,
            key=key,
        )
        assert offset == expected


def test_offset_beyond_32_bits(core):
    offset = core.paged_offset(
        block_table=[-1, 100_000], page_size=256, page_stride=2**22, row_stride=2**14, key=511
    )
    assert offset == 100_000 * 2**22 + 255 * 2**14
    assert offset > 2**38


def test_offset_of_a_page_larger_than_32_bits(core):
    offset = core.paged_offset(
        block_table=[0], page_size=INT_MAX, page_stride=0, row_stride=2**10, key=INT_MAX - 1
    )
    assert offset == (INT_MAX - 1) * 2**10
