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

import torch

from build_tools import instantiate
from build_tools.ninja_file import ABI_FLAGS
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


# All of csrc that is compiled by the host's compiler, except what is about real GPUs and about
# Python. It is registered with torch for tensors in the host's memory.
HOST_SIDE = sorted(
    path
    for path in host_build.CSRC.rglob("*.cpp")
    if path.relative_to(host_build.CSRC).as_posix() not in ("host/device.cpp", "api/module.cpp")
)
TORCH = Path(torch.__file__).parent


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
    common = [
        *FLAGS,
        *shlex.split(os.environ.get("CXXFLAGS", "")),  # -g -O0 for a debugger
        f"-I{host_build.CSRC}",
        f"-isystem{CUDA}",
        *host_build.python_flags(),
    ]
    kernels = [
        f"-I{HERE / 'emulated'}",  # before csrc
        f"-I{HERE}",
        *common,
        *(f"-isystem{path}" for path in (CUTLASS, CUDA / "cccl")),
        f"-include{HERE / 'instructions.h'}",  # before any header of CuTe
    ]
    library = [
        *common,
        *ABI_FLAGS,
        f"-isystem{TORCH / 'include'}",
        f"-include{HERE / 'library' / 'prelude.h'}",
    ]
    generated = instantiate.generate(OUT / "gen", ["80"])
    headers = [*host_build.CSRC.rglob("*.h"), *HERE.rglob("*.h")]
    kernel_files = [*generated, *sorted(host_build.CSRC.rglob("*.cu")), HERE / "module.cpp"]
    flags = dict.fromkeys(kernel_files, kernels)
    flags |= dict.fromkeys([*HOST_SIDE, *HERE.glob("library/*.cpp")], library)

    def make(target: Path) -> None:
        with ThreadPoolExecutor(max_workers=2) as pool:
            objects = list(pool.map(_compile, flags.keys(), flags.values()))
        link = [host_build.compiler(), "-shared", "-Wl,-Bsymbolic", *objects, "-o", str(target)]
        host_build.run([*link, f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"])

    return host_build.build_once(OUT, MODULE, [*kernels, *library], [*flags, *headers], make)


def _compile(source: Path, flags: list[str]) -> str:
    target = str(OUT / f"{source.parent.name}_{source.stem}.o")
    command = [*host_build.cached_compiler(), *flags, "-x", "c++", "-c", str(source), "-o", target]
    host_build.run(command)
    return target


if __name__ == "__main__":
    print(build())
