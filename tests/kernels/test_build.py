"""Where the kernels cannot be compiled for the host, their tests are skipped and say why."""

from pathlib import Path

import pytest

from tests import host_build
from tests.kernels import build, library
from third_party import fetch


@pytest.fixture
def no_headers(monkeypatch, tmp_path) -> Path:
    """A machine that has nothing of CUTLASS, nothing compiled, and no way to an index."""

    def offline(*_):
        raise fetch.FetchError("no route to host")

    monkeypatch.setattr(build, "cuda_headers", lambda: tmp_path)
    monkeypatch.setattr(build, "CUTLASS", tmp_path)
    monkeypatch.setattr(build, "OUT", tmp_path)
    monkeypatch.setattr(fetch, "fetch_cutlass", offline)
    monkeypatch.setattr(library, "_library", None)
    return tmp_path


def test_without_headers_every_test_is_skipped(no_headers, monkeypatch):
    kept = []  # as pytest keeps a skip, and with it all that its frames refer to
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match="no CUTLASS headers in") as skipped:
            library.serving(monkeypatch, 80).__enter__()
        kept.append(skipped)
    for load in (build.load, build.load_selftest):
        with pytest.raises(pytest.skip.Exception, match="no CUTLASS headers"):
            host_build.load_or_skip(load)


def test_the_first_step_of_make_test_says_why_they_will_be_skipped(no_headers, capsys):
    assert build.main() == 0
    assert "will be skipped: no route to host" in capsys.readouterr().out


def test_without_a_toolkit_too(monkeypatch, tmp_path):
    monkeypatch.setattr(build.probe, "find_nvcc", lambda: build.probe.Nvcc(tmp_path, tmp_path, ""))
    build.cuda_headers.cache_clear()
    with pytest.raises(host_build.Unavailable, match=f"no CUDA headers in {tmp_path}"):
        build.cuda_headers()
    build.cuda_headers.cache_clear()
