"""Compile csrc/core and its bindings with the host's C++ compiler: no nvcc, no GPU, seconds.

The module goes to build/unit. Its name carries a hash of everything it is made from, so it is made
once, and a stale one is never loaded.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
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
    spec = importlib.util.spec_from_file_location(MODULE, build())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build() -> Path:
    """Compile what is out of date and return the path of the module."""
    compiler, flags = _compiler(), _flags()
    bindings = sorted(BINDINGS.glob("*.cpp"))
    headers = [*CSRC.glob("core/*.h"), *CSRC.glob("params/*.h"), *BINDINGS.glob("*.h")]
    digest = _digest([_run([compiler, "--version"]), *flags], [*bindings, *sorted(headers)])
    module = OUT / f"{MODULE}-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"

    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as lock:  # pytest-xdist's workers all get here
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            for stale in OUT.glob(f"{MODULE}-*"):
                stale.unlink()
            _compile(compiler, flags, bindings, module)
    return module


def _compile(compiler: str, flags: list[str], sources: list[Path], target: Path) -> None:
    # As one source, because most of the time goes into reading pybind11: 7 seconds in place of 35.
    together = OUT / f"{MODULE}.cpp"
    together.write_text("".join(f'#include "{source}"\n' for source in sources))
    partial = target.with_suffix(".part")
    _run([compiler, *flags, "-shared", str(together), "-o", str(partial)])
    partial.rename(target)


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise Unavailable(f"no C++ compiler: looked for {', '.join(names)}")
    return found


def _flags() -> list[str]:
    try:
        import pybind11
    except ImportError:
        raise Unavailable("pybind11 is not installed") from None
    python = sysconfig.get_path("include")
    return [*FLAGS, f"-I{CSRC}", f"-isystem{pybind11.get_include()}", f"-isystem{python}"]


def _digest(words: list[str], files: list[Path]) -> str:
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
