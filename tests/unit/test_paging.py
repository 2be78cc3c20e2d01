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
    """Pages in any order, one of them used twice; -1 and pages that do not exist have no keys."""
    block_table = [4, 0, -1, 9, 4, 10, -7]
    for position in range((len(block_table) + 2) * page_size):
        entry, row = divmod(position, page_size)
        page = block_table[entry] if entry < len(block_table) else -1
        slot = core.page_slot(
            block_table=block_table, page_size=page_size, pages=10, position=position
        )
        assert slot == ((page, row) if 0 <= page < 10 else None)


def test_the_largest_page(core):
    last = INT_MAX - 1
    assert core.page_slot(block_table=[2], page_size=INT_MAX, pages=3, position=last) == (2, last)


@pytest.mark.parametrize("batch_k", [-1, 0, 2, 3])
def test_without_pages_all_keys_are_in_the_sequences_entry(core, batch_k):
    expected = (batch_k, 70) if 0 <= batch_k < 3 else None
    assert core.page_slot(pages=3, batch_k=batch_k, position=70) == expected
