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
    return host_build.load(build(), "flash_kernels")


def load_selftest() -> ModuleType:
    """The module with small kernels that test the emulation itself."""
    sources = [*(HERE / "selftest").glob("*.cpp"), HERE / "hopper" / "matrix.cpp"]
    flags = dict.fromkeys(sources, _kernel_flags())
    return host_build.load(_build("flash_selftest", flags, []), "flash_selftest")


def build() -> Path:
    """Compile what is out of date and return the path of the module."""
    library = [
        *_common_flags(),
        *ABI_FLAGS,
        f"-isystem{TORCH / 'include'}",
        f"-include{HERE / 'library' / 'prelude.h'}",
    ]
    generated = instantiate.generate(OUT / "gen", ["80", "90a"])
    kernels = [*generated, *sorted(host_build.CSRC.rglob("*.cu")), HERE / "module.cpp"]
    kernels += (HERE / "hopper").glob("*.cpp")
    flags = dict.fromkeys(kernels, _kernel_flags())
    flags |= dict.fromkeys([*HOST_SIDE, *HERE.glob("library/*.cpp")], library)
    torch_libraries = [f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    return _build("flash_kernels", flags, torch_libraries)


def _common_flags() -> list[str]:
    if platform.machine() != "x86_64":
        raise host_build.Unavailable("csrc/sm80 asks for a register by `l`, which is x86-64's")
    for folder, what in ((CUTLASS / "cute", "CUTLASS headers"), (CUDA, "CUDA headers")):
        if not folder.exists():
            raise host_build.Unavailable(f"no {what} in {folder}")
    return [
        *FLAGS,
        *shlex.split(os.environ.get("CXXFLAGS", "")),  # -g -O0 for a debugger
        f"-I{host_build.CSRC}",
        f"-isystem{CUDA}",
        *host_build.python_flags(),
    ]


def _kernel_flags() -> list[str]:
    return [
        f"-I{HERE / 'emulated'}",  # before csrc
        f"-I{HERE}",
        *_common_flags(),
        *(f"-isystem{path}" for path in (CUTLASS, CUDA / "cccl")),
        f"-include{HERE / 'instructions.h'}",  # before any header of CuTe
        "-D__CUDACC_VER_MAJOR__=13",  # CuTe's tensor maps are the driver's
        "-D__CUDACC_VER_MINOR__=0",
        "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED=",  # csrc/sm90 says so, too, but too late
    ]


def _build(module: str, flags: dict[Path, list[str]], libraries: list[str]) -> Path:
    """The module of these sources, each with its flags."""
    headers = [
        *host_build.CSRC.rglob("*.h"),
        *(path for path in HERE.rglob("*.h*") if path.suffix in (".h", ".hpp")),
    ]

    def make(target: Path) -> None:
        with ThreadPoolExecutor(max_workers=2) as pool:
            compiled = pool.map(lambda item: _compile(module, *item), flags.items())
            objects = list(compiled)
        link = [host_build.compiler(), "-shared", "-Wl,-Bsymbolic", *objects, "-o", str(target)]
        host_build.run([*link, *libraries])

    all_flags = [*dict.fromkeys(flag for own in flags.values() for flag in own), *libraries]
    return host_build.build_once(OUT, module, all_flags, [*flags, *headers], make)


def _compile(module: str, source: Path, flags: list[str]) -> str:
    target = str(OUT / f"{module}_{source.parent.name}_{source.stem}.o")
    optimised = ["-O3"] if source.name == "matrix.cpp" else []  # most of the work is there
    command = [
        *host_build.cached_compiler(), *flags, *optimised, "-x", "c++", "-c", str(source),
        "-o", target,
    ]  # fmt: skip
    host_build.run(command)
    return target


if __name__ == "__main__":
    print(build())
