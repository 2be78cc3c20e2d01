"""Which launches may come between those of a call: no other call's (launch/stream_lock.h)."""

from __future__ import annotations

from itertools import chain
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .launch_model import CALLS, Launch, merging, plain, run

SCHEDULES = 300

calls = st.builds(
    lambda call, tiles: call(tiles), st.sampled_from([*CALLS.values()]), st.integers(1, 12)
)


@settings(deadline=None)
@given(st.lists(calls, min_size=1, max_size=4), st.integers(0, 2**32))
def test_call_after_call(core, calls, seed):
    """Whatever is early, and whichever blocks are fast."""
    assert run(core, [*chain(*calls)], Random(seed)) == (True, True)


def outcomes(core, launches: list[Launch]) -> set[tuple[bool, bool]]:
    return {run(core, launches, Random(seed)) for seed in range(SCHEDULES)}


def two_that_draw(tiles: int) -> list[Launch]:
    """A call whose second launch is early and draws before the first one has ended."""
    second = Launch(tiles + 1, min(tiles + 1, 4), "another counter", early=True)
    return [*plain(tiles), second, merging(2)]


@pytest.mark.parametrize("tiles", [(9, 9), (9, 6)])
def test_calls_that_mix(core, tiles):
    """Without a lock two threads on one stream would mix their launches, and early launches of such
    calls draw from one counter at the same time."""
    a, b = (two_that_draw(n) for n in tiles)
    assert outcomes(core, a + b) == {(True, True)}
    mixed = outcomes(core, [*chain(*zip(a, b, strict=True))])
    assert any(not right for right, _ in mixed)


def test_with_other_numbers_of_tiles_a_counter_stays_wrong(core):
    """For all calls that come later."""
    a, b = two_that_draw(9), two_that_draw(6)
    mixed = outcomes(core, [*chain(*zip(a, b, strict=True))])
    assert any(not zero for _, zero in mixed)


@pytest.mark.parametrize("name", CALLS)
def test_what_may_come_between(core, name):
    """Calls of other libraries do: launches that neither draw nor are early."""
    other = Launch(3, 3, lets_next=False)
    a = CALLS[name](9)
    assert outcomes(core, [*chain(*((launch, other) for launch in a))]) == {(True, True)}
