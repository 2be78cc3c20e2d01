"""Compile parts of csrc/ as Python modules with the host's C++ compiler: no nvcc, no GPU.

A module's name carries a hash of everything it is made from, so it is made once, and a stale one is
never loaded.
"""

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest

from build_tools import host_compiler

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"


class Unavailable(Exception):
    """This machine has no C++ compiler, no pybind11, or lacks headers."""


def compiler() -> str:
    """The host compiler: $CXX, or the first of g++, c++ and clang++."""
    return host_compiler.find(Unavailable)


def cached_compiler() -> list[str]:
    """The compiler behind ccache, where there is one; for commands that make one object file."""
    ccache = shutil.which("ccache")
    return [ccache, compiler()] if ccache else [compiler()]


def python_flags() -> list[str]:
    """Where a binding finds pybind11 and Python.h."""
    try:
        import pybind11
    except ImportError:
        raise Unavailable("pybind11 is not installed") from None
    return [f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_path('include')}"]


def run(command: list[str]) -> str:
    """Run a compiler; its messages are the error.

    Paths in the checkout are given relative to it: ccache then knows an object that it has from
    another checkout.
    """
    command = [word.replace(f"{ROOT}/", "") for word in command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build_once(
    out: Path, name: str, flags: list[str], files: Iterable[Path], make: Callable[[Path], None]
) -> Path:
    """The module `name` in folder `out` for these flags and files; `make(target)` where missing."""
    digest = _digest([run([compiler(), "--version"]), *flags], files)
    module = out / f"{name}-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:  # pytest-xdist's workers all get here
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            for stale in out.glob(f"{name}-*"):
                stale.unlink()
            partial = module.with_suffix(".part")
            make(partial)
            partial.rename(module)
    return module


def load(path: Path, name: str) -> ModuleType:
    """Import the module at `path` under the name its init function has."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_or_skip(load: Callable[[], ModuleType]) -> ModuleType:
    """What `load` gives; where it cannot be compiled, the test is skipped with the reason."""
    try:
        return load()
    except Unavailable as reason:
        pytest.skip(f"csrc cannot be compiled here: {reason}")


def _digest(words: list[str], files: Iterable[Path]) -> str:
    digest = hashlib.sha256("\0".join(words).encode())
    for path in sorted(files):
        digest.update(f"\0{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
