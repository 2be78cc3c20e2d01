"""Compile csrc/core and its bindings with the host's C++ compiler: no nvcc, no GPU, seconds.

The module goes to build/unit. Its name and those of the object files carry a hash of everything
they are made from, so a run recompiles only what changed, and never loads a stale module.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
BINDINGS = Path(__file__).resolve().parent
OUT = ROOT / "build" / "unit"
MODULE = "flash_core"
FLAGS = [
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # unroll
    # Undefined behaviour in a header stops the run at the test that reached it. Traps, because the
    # sanitizer's own runtime library is not installed everywhere.
    "-fsanitize=signed-integer-overflow,shift,integer-divide-by-zero,bounds,float-cast-overflow",
    "-fsanitize-undefined-trap-on-error",
]


class Unavailable(Exception):
    """This machine has no C++ compiler, or no pybind11."""


def load() -> ModuleType:
    """Return the module with the bindings, compiled first where necessary.

    Raises Unavailable without a compiler or pybind11, and RuntimeError with the compiler's
    messages when it rejects the sources.
    """
    path = build()
    spec = importlib.util.spec_from_file_location(MODULE, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build() -> Path:
    """Compile what is out of date and return the path of the module."""
    compiler, flags = _compiler(), _flags()
    version = _run([*compiler, "--version"])
    headers = [*sorted(CSRC.glob("core/*.h")), *sorted(CSRC.glob("params/*.h"))]
    common = _digest([version, *flags], [*headers, BINDINGS / "bindings.h"])
    objects = {
        source: OUT / f"{source.stem}-{_digest([common], [source])}.o"
        for source in sorted(BINDINGS.glob("*.cpp"))
    }
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    module = OUT / f"{MODULE}-{_digest([str(o) for o in objects.values()])}{suffix}"

    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as lock:  # pytest-xdist's workers all get here
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            _remove_stale({module, *objects.values()})
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                missing = [(s, o) for s, o in objects.items() if not o.exists()]
                list(pool.map(lambda pair: _compile(compiler, flags, *pair), missing))
            _link(compiler, flags, list(objects.values()), module)
    return module


def _compiler() -> list[str]:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise Unavailable(f"no C++ compiler: looked for {', '.join(names)}")
    ccache = shutil.which("ccache")
    return [ccache, found] if ccache else [found]


def _flags() -> list[str]:
    try:
        import pybind11
    except ImportError:
        raise Unavailable("pybind11 is not installed") from None
    python = sysconfig.get_path("include")
    return [*FLAGS, f"-I{CSRC}", f"-isystem{pybind11.get_include()}", f"-isystem{python}"]


def _compile(compiler: list[str], flags: list[str], source: Path, target: Path) -> None:
    _run([*compiler, *flags, "-c", str(source), "-o", f"{target}.part"])
    Path(f"{target}.part").rename(target)


def _link(compiler: list[str], flags: list[str], objects: list[Path], target: Path) -> None:
    _run([*compiler, *flags, "-shared", *map(str, objects), "-o", f"{target}.part"])
    Path(f"{target}.part").rename(target)


def _remove_stale(wanted: set[Path]) -> None:
    for path in [*OUT.glob("*.o"), *OUT.glob("*.so")]:
        if path not in wanted:
            path.unlink()


def _digest(words: list[str], files: list[Path] = ()) -> str:
    digest = hashlib.sha256("\0".join(words).encode())
    for path in files:
        digest.update(f"\0{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    print(build())
