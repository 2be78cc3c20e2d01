"""CUTLASS's headers: fetched, verified, and in part kept away."""

from __future__ import annotations

import zipfile

import pytest

from tests.commands import ROOT
from third_party import fetch


@pytest.fixture
def cutlass_wheel(tmp_path):
    path = tmp_path / fetch.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.HEADERS + "cute/tensor.hpp", "// cute")
        archive.writestr(fetch.LICENSE, "BSD")
        archive.writestr("cutlass_cppgen/__init__.py", "")
    return path


def test_fetched_headers_are_verified(tmp_path, cutlass_wheel):
    target = tmp_path / "cutlass"
    with pytest.raises(fetch.FetchError, match=f"{fetch.SHA256} is pinned"):
        fetch.fetch_cutlass(target, cutlass_wheel)
    assert not target.exists()
    assert list(tmp_path.iterdir()) == [cutlass_wheel]


def test_fetch_is_idempotent(tmp_path, cutlass_wheel):
    target = tmp_path / "cutlass"
    sha256 = fetch.hashlib.sha256(cutlass_wheel.read_bytes()).hexdigest()
    include = fetch.fetch_cutlass(target, cutlass_wheel, sha256)
    assert (include / "cute/tensor.hpp").read_text() == "// cute"
    assert sorted(path.name for path in target.iterdir()) == [
        "LICENSE.txt",
        "WHEEL.sha256",
        "include",
    ]
    cutlass_wheel.unlink()
    assert fetch.fetch_cutlass(target, cutlass_wheel, sha256) == include


def test_offline_fetch_says_what_to_do(tmp_path, monkeypatch):
    def offline(folder):
        raise OSError("no route to host")

    monkeypatch.setattr(fetch, "_with_pip", offline)
    monkeypatch.setattr(fetch, "_from_index", offline)
    with pytest.raises(fetch.FetchError, match=r"no route to host.*--wheel"):
        fetch.fetch_cutlass(tmp_path / "cutlass")


LEAN = [path.relative_to(ROOT / "third_party/lean") for path in
        (ROOT / "third_party/lean").rglob("*.hpp")]  # fmt: skip


@pytest.mark.skipif(not fetch.CUTLASS.exists(), reason="no CUTLASS headers")
@pytest.mark.parametrize("header", LEAN, ids=str)
def test_an_empty_header_is_in_the_place_of_one_of_cutlass(header):
    assert (fetch.CUTLASS / "include" / header).exists()
