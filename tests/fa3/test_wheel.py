"""The second wheel: what is in it, who owns the modules, and what it raises beside another."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from build_tools import check_wheel, try_wheel
from tests.commands import ROOT, run, wheel_of

FOLDER = ROOT / "flash-attn-3"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build leaves its folders where it ran."""
    tmp = tmp_path_factory.mktemp("wheel3")
    copy = tmp / "flash-attn-3"
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(FOLDER, copy, ignore=ignored)
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps",
        "--wheel-dir", tmp, copy,
    )  # fmt: skip
    (found,) = tmp.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    target = wheel.parent / "site"
    run(
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target,
        wheel,
    )  # fmt: skip
    return target


def test_the_wheel(wheel):
    assert wheel.name == "flash_attn_3-3.0.0-py3-none-any.whl"
    assert check_wheel.check(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read("flash_attn_3-3.0.0.dist-info/METADATA").decode()
    modules = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py")}
    modules = {name for name in modules if not name.startswith("build/")}
    assert {name for name in names if ".dist-info/" not in name} == modules
    assert "Requires-Dist: flash-attn==2.8.3" in metadata
    assert wheel.stat().st_size < 100_000


def test_both_wheels_are_tried_where_nothing_else_is(wheel, tmp_path, monkeypatch, capsys):
    first = wheel_of(tmp_path, FLASH_ATTN_CUDA_ARCHS="none")
    assert try_wheel.main([str(first), "--fa3", str(wheel)]) == 0
    assert f"{wheel.name}: beside it, with the same results" in capsys.readouterr().out
    monkeypatch.setattr(try_wheel, "_FA3", "print(False, '')")
    assert try_wheel.main([str(first), "--fa3", str(wheel)]) == 1
    assert "does not compute what flash_attn does" in capsys.readouterr().err


def python(installed: Path, program: str, **env):
    path = f"{installed}:{ROOT}"
    return run(sys.executable, "-c", program, cwd=installed, check=False, PYTHONPATH=path, **env)


def test_installed_it_owns_its_modules(installed):
    program = (
        "import importlib.metadata as m, flash_attn_interface, flash_attn_config, flash_attn_3\n"
        "owners = m.packages_distributions()\n"
        "names = ('flash_attn_interface', 'flash_attn_config', 'flash_attn_3')\n"
        "print({owner for name in names for owner in owners[name]}, m.version('flash-attn-3'))\n"
        "print(flash_attn_interface.__file__)\n"
        "import torch; q = torch.randn(1, 4, 2, 8)\n"
        "print(tuple(flash_attn_interface.flash_attn_func(q, q, q).shape))"
    )
    done = python(installed, program)
    assert done.returncode == 0, done.stderr
    owners, file, shape = done.stdout.splitlines()
    assert owners == "{'flash-attn-3'} 3.0.0"
    assert Path(file) == installed / "flash_attn_interface.py"
    assert shape == "(1, 4, 2, 8)"


def test_transformers_finds_it(installed):
    pytest.importorskip("transformers")
    program = (
        "import torch; torch.cuda.is_available = lambda: True\n"
        "import transformers.modeling_flash_attention_utils as client\n"
        "needs = client.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3]\n"
        "print(needs['pkg_availability_check']())"
    )
    done = python(installed, program)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("name", ["fwd", "bwd", "fwd_combine", "get_scheduler_metadata"])
def test_another_package_has_defined_an_operator(installed, name):
    program = (
        "import torch\n"
        "theirs = torch.library.Library('flash_attn_3', 'DEF')\n"
        f"theirs.define('{name}(Tensor q) -> Tensor')\n"
        "import flash_attn_interface"
    )
    done = python(installed, program)
    assert done.returncode == 1
    assert f"ImportError: torch.ops.flash_attn_3.{name} is there already" in done.stderr


def test_a_compiled_library_has_the_namespace(installed):
    """Of which torch says so in its own words: there is one of each."""
    program = (
        "import torch\n"
        "torch.library.Library = lambda *args: exec('raise RuntimeError(\\'Only a single\\')')\n"
        "import flash_attn_3._C"
    )
    done = python(installed, "import flash_attn.layers.rotary\n" + program)
    assert done.returncode == 1
    assert "ImportError: torch.ops.flash_attn_3 is there already" in done.stderr


def test_beside_the_flash_attn_of_another(installed, tmp_path):
    (tmp_path / "flash_attn.py").write_text("__version__ = '2.8.3'\n")
    path = f"{installed}:{tmp_path}"
    done = run(sys.executable, "-c", "import flash_attn_interface", cwd=tmp_path, check=False,
               PYTHONPATH=path)  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: flash-attn-3 of this repository needs its flash-attn")


def test_its_license_is_that_of_the_repository():
    assert (FOLDER / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
