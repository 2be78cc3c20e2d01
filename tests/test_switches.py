"""Environment variables: their values are checked, and one table has them all."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from build_tools import build, ninja_file, switch_page, switches
from build_tools.probe import BuildError
from flash_attn import _switches
from tests.commands import ROOT, run, script

SWITCHES = _switches.AT_RUN_TIME + _switches.AT_BUILD_TIME
IMPORT = (sys.executable, "-c", "import flash_attn")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, True) for value in ("1", "true", "Yes", "on")),
        *((value, False) for value in ("0", "false", "NO", "off")),
        *((value, None) for value in ("", " ")),
    ],
)
def test_flag(value, expected):
    assert _switches.flag("A", {"A": value}) is expected
    assert _switches.flag("A", {}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLASH_ATTN_LOG", "loud"),
        ("FLASH_ATTN_CHECK", "2"),
        *(("FLASH_ATTN_ARCH", value) for value in ("hopper", "89", "sm90", " 90")),
    ],
)
def test_a_value_that_there_is_not_is_an_error_of_the_import(name, value):
    done = run(*IMPORT, check=False, **{name: value})
    assert done.returncode == 1
    assert f"ValueError: {name}: got {value!r}" in done.stderr


@pytest.mark.parametrize("value", ["", "0", "80", "90"])
def test_families(value):
    run(*IMPORT, FLASH_ATTN_ARCH=value)


def test_flags_of_the_build():
    def strict(*release: int, **env: str) -> bool:
        return build._strict(SimpleNamespace(nvcc=SimpleNamespace(version=release)), env)

    assert strict(12, 4, FLASH_ATTN_STRICT="true")
    assert not strict(13, 0, FLASH_ATTN_STRICT="no")
    assert strict(13, 0)
    assert not strict(13, 1, FLASH_ATTN_STRICT="")
    with pytest.raises(BuildError, match="FLASH_ATTN_STRICT: got 'maybe'; accepted: 1, true"):
        strict(13, 0, FLASH_ATTN_STRICT="maybe")
    assert switches.flag("FLASH_ATTN_LINEINFO", {"FLASH_ATTN_LINEINFO": "yes"})
    assert not switches.flag("FLASH_ATTN_LINEINFO", {})


def test_the_compiler_is_one(tmp_path):
    script(tmp_path / "c++-99", "exit 0")
    for cxx in ("c++-99", str(tmp_path / "c++-99")):
        assert ninja_file._find_cxx({"CXX": cxx, "PATH": str(tmp_path)}) == cxx
    with pytest.raises(BuildError, match='CXX is "no-such-compiler"'):
        ninja_file._find_cxx({"CXX": "no-such-compiler"})


def test_the_table_has_every_variable_that_is_read():
    folders = ("flash_attn", "csrc", "build_tools", "Makefile", "setup.py", ".ci")
    paths = [path for name in folders for path in [ROOT / name, *(ROOT / name).rglob("*")]]
    code = [p.read_text() for p in paths if p.is_file() and p.suffix in (".py", ".cpp", ".h", "")]
    read = {name for text in code for name in re.findall(r"\bFLASH_ATTN_[A-Z_]+\b", text)}
    named = {switch.name for switch in SWITCHES if switch.name.startswith("FLASH_ATTN_")}
    assert read == named


def test_the_page_is_the_table():
    assert switch_page.main(["--check"]) == 0, "run python -m build_tools.switch_page --write"
