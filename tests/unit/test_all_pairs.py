"""Which combinations of a test's parameters run (tests/all_pairs.py)."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

from tests.all_pairs import covering

ROOT = Path(__file__).resolve().parents[2]


def pairs(cases: list[dict]) -> set:
    return {pair for case in cases for pair in combinations(sorted(case.items()), 2)}


def test_every_pair_is_there():
    cases = [
        dict(zip("abcd", values)) for values in product(range(4), range(3), range(5), range(2))
    ]
    taken = covering(cases)
    assert taken == sorted(set(taken))
    assert pairs([cases[i] for i in taken]) == pairs(cases)
    assert 4 * 5 <= len(taken) <= 30  # of 120


def test_pairs_that_no_case_has_are_not_missed():
    cases = [{"a": a, "b": b, "c": c} for a, b, c in product(range(3), repeat=3) if a <= b]
    assert pairs([cases[i] for i in covering(cases)]) == pairs(cases)


def test_the_same_everywhere():
    """Processes that share a suite have to agree."""
    cases = [dict(zip("abc", values)) for values in product(range(3), repeat=3)]
    assert covering(cases) == covering(list(cases))


SUITE = """
import pytest
from types import SimpleNamespace
ROWS = [SimpleNamespace(dtype=d, name=f"fwd_{d}_{n}") for n in (64, 128) for d in ("bf16", "fp16")]

@pytest.mark.parametrize("a", [1, 2, 3])
def test_one(a): pass

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", ["x", "y"])
def test_two(a, b): pass

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", ["x", "y", "z"])
@pytest.mark.parametrize("c", [None, ()])
def test_three(a, b, c): pass

@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("a", [1, 2, 3, 4])
def test_rows(row, a): pass

@pytest.mark.parametrize("a, b", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize(("c", "d"), [(1, 1), (2, 1)])
def test_together(a, b, c, d): pass

@pytest.mark.gpu
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", ["x", "y", "z"])
@pytest.mark.parametrize("c", [None, ()])
def test_gpu(a, b, c): pass
"""


def test_of_a_suite(tmp_path):
    def collected(*options: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
             "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, *options, tmp_path],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.split("::")[1].split("[")[0] for line in done.stdout.split() if "::" in line]

    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems\n"
    )
    full = {
        "test_one": 3,
        "test_two": 6,
        "test_three": 18,
        "test_rows": 16,
        "test_gpu": 18,
        "test_together": 10,
    }
    every = collected("--every-combination")
    assert {name: every.count(name) for name in full} == full
    some = collected()
    assert {name: some.count(name) for name in full} == full | {"test_three": 9, "test_rows": 8}
