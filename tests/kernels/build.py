"""Compile every kernel of the variant table for the host, to build/kernels.

The instantiations are those of the GPU build, in fewer files. Only what they include to launch
themselves, and the instructions that CuTe's structs stand for, come from this folder.
"""

import os
import platform
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from build_tools import instantiate, probe, resources
from build_tools.ninja_file import ABI_FLAGS, CUTLASS_INCLUDES
from tests import host_build
from third_party import fetch

HERE = Path(__file__).resolve().parent
OUT = host_build.ROOT / "build" / "kernels"
CUTLASS = fetch.CUTLASS / "include"
FLAGS = [
    "-std=c++20",
    "-O1",  # two thirds of what -O2 takes to compile; products, most of the work, have -O3
    "-fno-strict-aliasing",  # CuTe reads registers as other types
    "-fPIC",
    "-fvisibility=hidden",
    "-Wno-unknown-pragmas",
    "-U_FORTIFY_SOURCE",  # its longjmp takes a jump to another stack for an attack
]
# One file on one core, without ccache's help; for the estimate.
SECONDS_PER_FILE = 11

# All of csrc that is compiled by the host's compiler, except what is about real GPUs. It is
# registered with torch for tensors in the host's memory.
HOST_SIDE = sorted(
    path
    for path in host_build.CSRC.rglob("*.cpp")
    if path.relative_to(host_build.CSRC).as_posix() != "launch/device.cpp"
)
# Of matrices, the instructions of either family: most of the work.
PRODUCTS = [HERE / "tensor_core.cpp", HERE / "hopper" / "matrix.cpp"]
TORCH = Path(torch.__file__).parent


def load() -> ModuleType:
    """The module with the kernels; raises Unavailable where it cannot be compiled."""
    return host_build.load(build(), "flash_kernels")


def load_selftest() -> ModuleType:
    """The module with small kernels that test the emulation itself."""
    return host_build.load(build_selftest(), "flash_selftest")


def build_selftest() -> Path:
    sources = [*(HERE / "selftest").glob("*.cpp"), *PRODUCTS]
    flags = dict.fromkeys(sources, _kernel_flags(hopper=True))
    return _build("flash_selftest", flags, [])


def build() -> Path:
    """Compile what is out of date and return the path of the module."""
    library = [
        *_common_flags(),
        *ABI_FLAGS,
        f"-isystem{TORCH / 'include'}",
        f"-include{HERE / 'library' / 'prelude.h'}",
    ]
    generated = instantiate.generate(OUT / "gen", ["80", "90a"], instantiate.family_stem)
    # The longest first, so that no core waits for another one's at the end.
    generated.sort(key=lambda path: path.stat().st_size, reverse=True)
    kernels = [*generated, *sorted(host_build.CSRC.rglob("*.cu")), HERE / "module.cpp", *PRODUCTS]
    kernels.append(HERE / "hopper" / "driver.cpp")
    flags = {
        path: _kernel_flags("sm90" in path.relative_to(host_build.ROOT).as_posix())
        for path in kernels
    }
    flags |= dict.fromkeys([*HOST_SIDE, *HERE.glob("library/*.cpp")], library)
    torch_libraries = [f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    return _build("flash_kernels", flags, torch_libraries)


@cache
def cuda_headers() -> Path:
    """CUTLASS reads CUDA's headers; those of the toolkit will do, no part of it is run."""
    nvcc = probe.find_nvcc()
    root = nvcc.root if nvcc else Path("/usr/local/cuda")
    if not (root / "include" / "cuda_runtime.h").exists():
        raise host_build.Unavailable(
            f"no CUDA headers in {root / 'include'}: install a CUDA toolkit, or set CUDA_HOME"
        )
    return root / "include"


def _common_flags() -> list[str]:
    if platform.machine() != "x86_64":
        raise host_build.Unavailable("csrc/sm80 asks for a register by `l`, which is x86-64's")
    cuda = cuda_headers()
    if not (CUTLASS / "cute").exists():
        raise host_build.Unavailable(
            f"no CUTLASS headers in {CUTLASS}: python third_party/fetch.py"
        )
    return [
        *FLAGS,
        *shlex.split(os.environ.get("CXXFLAGS", "")),  # -g -O0 for a debugger
        f"-I{host_build.CSRC}",
        f"-isystem{cuda}",
        *host_build.python_flags(),
    ]


def _kernel_flags(hopper: bool) -> list[str]:
    # sm90/tensor_core.h wants to be first; before it instructions.h reads other headers of CuTe.
    widths = ["-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED="] if hopper else []
    return [
        *widths,
        f"-I{HERE / 'emulated'}",  # before csrc
        f"-I{HERE}",
        *_common_flags(),
        *(f"-isystem{host_build.ROOT / path}" for path in CUTLASS_INCLUDES),
        f"-isystem{cuda_headers() / 'cccl'}",
        f"-include{HERE / 'instructions.h'}",  # before any header of CuTe
        "-D__CUDACC_VER_MAJOR__=13",  # CuTe's tensor maps are the driver's
        "-D__CUDACC_VER_MINOR__=0",
    ]


def _build(module: str, flags: dict[Path, list[str]], libraries: list[str]) -> Path:
    """The module of these sources, each with its flags."""
    headers = [
        *host_build.CSRC.rglob("*.h"),
        *(path for path in HERE.rglob("*.h*") if path.suffix in (".h", ".hpp")),
    ]

    def make(target: Path) -> None:
        objects = _compile_all(module, flags)
        link = [host_build.compiler(), "-shared", "-Wl,-Bsymbolic", *objects, "-o", str(target)]
        host_build.run([*link, *libraries])

    all_flags = [*dict.fromkeys(flag for own in flags.values() for flag in own), *libraries]
    return host_build.build_once(OUT, module, all_flags, [*flags, *headers], make)


def _compile_all(module: str, flags: dict[Path, list[str]]) -> list[str]:
    """Says how long it takes and how far it is: this is the longest wait of a first run."""
    jobs = resources.cores()
    minutes = max(1, round(len(flags) * SECONDS_PER_FILE / jobs / 60))
    print(
        f"{module}: compiling the kernels for the host, {len(flags)} files, {jobs} at a time; "
        f"about {minutes} min, seconds where ccache has them.",
        flush=True,
    )
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = {pool.submit(_compile, module, *item): item[0] for item in flags.items()}
        for number, done in enumerate(as_completed(running), start=1):
            done.result()
            print(f"[{number}/{len(flags)}] {running[done].name}", flush=True)
    return [job.result() for job in running]


def _compile(module: str, source: Path, flags: list[str]) -> str:
    target = str(OUT / f"{module}_{source.parent.name}_{source.stem}.o")
    optimised = ["-O3"] if source in PRODUCTS else []
    command = [
        *host_build.cached_compiler(), *flags, *optimised, "-MD", "-x", "c++", "-c", str(source),
        "-o", target,
    ]  # fmt: skip
    host_build.run(command)
    return target


def main() -> int:
    """What `make test` does first. A machine that cannot compile them skips the tests that need
    them, so it is told why and no more."""
    try:
        cuda_headers()
        fetch.fetch_cutlass()
        build()
        build_selftest()
    except (host_build.Unavailable, fetch.FetchError) as reason:
        print(f"The tests of the kernels on the host will be skipped: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
