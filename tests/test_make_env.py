"""The environment of `make`: a Python that has a torch shares it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import make_env, newest_torch
from tests.commands import ROOT, run

MAKE = """
from build_tools import make_env
make_env.install_torch = lambda *_: print("installs torch")
make_env.install_package = lambda *_: None
make_env.make(make_env._parser().parse_args([{venv!r}]))
"""


@pytest.fixture
def python(tmp_path) -> Path:
    """Of a virtual environment of a user's, without torch."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "mine")
    return tmp_path / "mine" / "bin" / "python"


def put_torch(python: Path, version: str) -> None:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([python, "-c", code], text=True).strip())
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")


@pytest.mark.parametrize("version", ["2.13.0", "2.9.0", None])
def test_a_virtual_environments_torch_is_shared(python, tmp_path, version):
    if version:
        put_torch(python, version)
    done = run(python, "-c", MAKE.format(venv=str(tmp_path / "made")), cwd=ROOT)
    shares = version == "2.13.0"
    assert ("sharing" in done.stdout) == shares
    assert ("installs torch" in done.stdout) == (not shares)
    if shares:
        made = tmp_path / "made" / "bin" / "python"
        found = run(made, "-c", "import torch.version as v; print(v.__file__)", cwd=tmp_path)
        assert Path(found.stdout.strip()).is_relative_to(tmp_path / "mine")


def test_no_newest_torch_is_no_failure(monkeypatch, tmp_path, capsys):
    def fails(*arguments):
        raise subprocess.CalledProcessError(1, ["pip", "install", *map(str, arguments)])

    monkeypatch.setattr(newest_torch, "VENV", tmp_path / "newest")
    monkeypatch.setattr(make_env, "create", lambda *_, **__: None)
    monkeypatch.setattr(make_env, "install_torch", fails)
    assert newest_torch.main([]) == 0
    assert "not tested with the newest torch" in capsys.readouterr().out


def test_the_newest_torch_runs_files_that_there_are():
    assert all((ROOT / name).exists() for name in newest_torch.TESTS)
