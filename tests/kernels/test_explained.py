"""flash_attn.explain says what runs: kernel and tile, of random calls."""

from __future__ import annotations

import sys

import pytest

from tests.commands import run


@pytest.mark.parametrize("sm", [80, 90])
def test_what_explain_says_runs(kernels, sm):
    """In a process of its own, which takes the library for one of a GPU."""
    count = 60
    done = run(sys.executable, "-m", "tests.kernels.explained", sm, count)
    *wrong, seen = done.stdout.splitlines()
    assert not wrong
    assert int(seen) > count / 2
