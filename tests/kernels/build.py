"""Compile every kernel of the variant table for the host, to build/kernels.

The instantiations are those of the GPU build. Only what they include to launch themselves, and the
instructions that CuTe's structs stand for, come from this folder.
"""

import os
import platform
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from build_tools import instantiate
from tests import host_build

HERE = Path(__file__).resolve().parent
OUT = host_build.ROOT / "build" / "kernels"
CUTLASS = host_build.ROOT / "third_party" / "cutlass" / "include"
MODULE = "flash_kernels"
# CUTLASS reads CUDA's headers; those of the toolkit will do, no part of it is run.
CUDA = Path("/usr/local/cuda/include")
FLAGS = [
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wno-unknown-pragmas",
    "-U_FORTIFY_SOURCE",  # its longjmp takes a jump to another stack for an attack
]


def load() -> ModuleType:
    """The module with the kernels; raises Unavailable where it cannot be compiled."""
    return host_build.load(build(), MODULE)


def build() -> Path:
    """Compile what is out of date and return the path of the module."""
    if platform.machine() != "x86_64":
        raise host_build.Unavailable("csrc/sm80 asks for a register by `l`, which is x86-64's")
    for folder, what in ((CUTLASS / "cute", "CUTLASS headers"), (CUDA, "CUDA headers")):
        if not folder.exists():
            raise host_build.Unavailable(f"no {what} in {folder}")
    flags = [
        *FLAGS,
        *shlex.split(os.environ.get("CXXFLAGS", "")),  # -g -O0 for a debugger
        f"-I{HERE / 'emulated'}",
        f"-I{HERE}",
        f"-I{host_build.CSRC}",
        *(f"-isystem{path}" for path in (CUTLASS, CUDA, CUDA / "cccl")),
        f"-include{HERE / 'instructions.h'}",  # before any header of CuTe
        *host_build.python_flags(),
    ]
    generated = instantiate.generate(OUT / "gen", ["80"])
    headers = [*host_build.CSRC.rglob("*.h"), *HERE.rglob("*.h")]
    sources = [*generated, HERE / "module.cpp"]

    def make(target: Path) -> None:
        with ThreadPoolExecutor(max_workers=2) as pool:
            objects = list(pool.map(lambda source: _compile(source, flags), sources))
        host_build.run([host_build.compiler(), "-shared", *objects, "-o", str(target)])

    return host_build.build_once(OUT, MODULE, flags, [*sources, *headers], make)


def _compile(source: Path, flags: list[str]) -> str:
    target = str(OUT / f"{source.stem}.o")
    command = [*host_build.cached_compiler(), *flags, "-x", "c++", "-c", str(source), "-o", target]
    host_build.run(command)
    return target


if __name__ == "__main__":
    print(build())
