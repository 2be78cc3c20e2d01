"""Pieces become one in rounds, in any order, and leave the counters as they found them."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def merge(core, pieces: int, fan_in: int, order: list[int]):
    """Pieces are done in this order; the result, and what each merging read."""
    done = {piece: [piece] for piece in range(pieces)}
    counters, merged, result = Counter(), [], None
    for piece in order:
        for first, stride, count, counter, last in core.merge_rounds(pieces, piece, fan_in):
            if count > 1:
                assert 0 <= counter < pieces
                counters[counter] = (counters[counter] + 1) % count  # atomicInc
                if counters[counter] != 0:
                    break
                members = [done.pop(first + n * stride) for n in range(count)]
                merged.append(members)
                done[first] = [number for member in members for number in member]
            if last:
                assert result is None
                result = done.pop(first)
    assert not done
    assert not any(counters.values())
    return result, merged


@settings(deadline=None)
@given(st.data(), st.integers(2, 300), st.integers(9, 40))
def test_each_piece_is_merged_once(core, data, pieces, fan_in):
    order = data.draw(st.permutations(range(pieces)))
    result, merged = merge(core, pieces, fan_in, order)
    assert result == list(range(pieces))  # in this order, whatever the order of arrival
    assert all(2 <= len(members) <= fan_in for members in merged)


@pytest.mark.parametrize("fan_in", [16, 20, 320])
def test_the_groups_do_not_depend_on_who_is_last(core, fan_in):
    forward, backward = (
        merge(core, 400, fan_in, order) for order in (range(400), range(399, -1, -1))
    )
    assert sorted(forward[1]) == sorted(backward[1])


@pytest.mark.parametrize(
    ("pieces", "rounds"), [(1, 0), (2, 1), (20, 1), (21, 2), (400, 2), (401, 3)]
)
def test_as_few_rounds_as_possible(core, pieces, rounds):
    assert len(core.merge_rounds(pieces, 0, 20)) == rounds


def test_the_most_pieces(core):
    """Products beyond 32 bits."""
    most = 2**31 - 1
    groups = core.merge_rounds(most, most - 1, 320)
    assert [last for *_, last in groups] == [False, False, False, True]
    assert groups[-1][:3] == (0, 320**3, most // 320**3 + 1)
    assert all(first + (count - 1) * stride < most for first, stride, count, *_ in groups)
