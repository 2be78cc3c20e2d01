"""Writes build.ninja: which files, which flags, which rules."""

from __future__ import annotations

import math
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from build_tools import resources, switches
from build_tools.instantiate import file_stem
from build_tools.plan import MIN_TORCH, Plan
from build_tools.probe import BuildError
from build_tools.targets import folder_targets, targets
from csrc.variants import FILES_THAT_SPILL

# Hidden visibility keeps our symbols, and those of templates we instantiate, out of other
# extensions' way: PyInit__C is all that leaves the library.
HOST_FLAGS = ["-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
              "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DNDEBUG"]  # fmt: skip
DEVICE_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "--expt-extended-lambda",
                "-Xptxas=-v", "-Xcompiler=-fPIC,-fvisibility=hidden",
                "-DNDEBUG"]  # fmt: skip
# lean: empty headers in the place of those that take longest to read and that no kernel needs.
CUTLASS_INCLUDES = ("third_party/lean", "third_party/cutlass/include")
# Python >= 3.10 and torch >= 2.10 by their stable interfaces: one library for all of them.
ABI_FLAGS = ["-DPy_LIMITED_API=0x030a0000", "-DUSE_CUDA",
             f"-DTORCH_TARGET_VERSION=0x{MIN_TORCH[0]:02x}{MIN_TORCH[1]:02x}{0:012x}"]  # fmt: skip
# --no-as-needed: the library refers to libtorch's registrations only through static initialisers,
# and the linker would drop what it sees no symbol used of.
# -lstdc++ comes first because libtorch exports stray copies of the C++ library's templates.
LINK_FLAGS = ["-shared", "-s", "-Wl,-O1", "-Wl,--version-script=build_tools/exports.map",
              "-Wl,--no-as-needed", "-lstdc++"]  # fmt: skip
# Where pip puts libcudart beside torch, so that the library also loads before torch's CUDA does.
RUNTIME_PATHS = ["$$ORIGIN/../nvidia/cu13/lib", "$$ORIGIN/../nvidia/cuda_runtime/lib"]


@dataclass(frozen=True)
class KernelSource:
    path: Path
    gencode: list[str]
    allow_spills: Mapping[str, float]  # bytes a thread, stored and loaded, by the row's name


@dataclass(frozen=True)
class Sources:
    kernels: list[KernelSource]
    host: list[Path]

    @classmethod
    def collect(cls, csrc: Path, generated: Sequence[Path], archs: Sequence[str], rows) -> Sources:
        """`rows` are those that the generated files hold; other .cu files are for every GPU, or
        for that of their folder."""
        kernels = []
        for path in sorted([*generated, *csrc.rglob("*.cu")]):
            if path.suffix != ".cu":
                continue
            own = [row for row in rows if file_stem(row) == path.stem]
            flags = [flag for row in own for flag in targets(row, archs)]
            spills = {row.name: _spill_limit(row) for row in own if row.allow_spills}
            if path.stem in FILES_THAT_SPILL:
                spills[path.stem] = FILES_THAT_SPILL[path.stem]
            flags = list(dict.fromkeys(flags)) or folder_targets(path.relative_to(csrc), archs)
            if flags:
                kernels.append(KernelSource(path, flags, spills))
        host = [*csrc.rglob("*.cpp"), *(path for path in generated if path.suffix == ".cpp")]
        return cls(kernels, sorted(host))


def _spill_limit(row) -> float:
    return math.inf if row.allow_spills is True else float(row.allow_spills)


def object_path(folder: Path, source: Path) -> Path:
    # Generated names are unique by themselves; csrc has a forward.cpp in more than one folder.
    prefix = "" if source.parent == folder / "gen" else f"{source.parent.name}_"
    return folder / "obj" / f"{prefix}{source.name}.o"


@dataclass(frozen=True)
class Toolchain:
    nvcc: Path
    nvcc_release: str
    cuda_root: Path
    cudart: Path
    torch_root: Path
    cxx: str
    ccache: str | None
    threads: int
    lineinfo: bool
    strict: bool

    @classmethod
    def detect(cls, plan: Plan, env: Mapping[str, str], strict: bool) -> Toolchain:
        cxx = _find_cxx(env)
        if not (_python_include() / "Python.h").exists():
            raise BuildError(
                f"Python.h is missing from {_python_include()}: install the python3-dev package."
            )
        return cls(
            nvcc=plan.nvcc.path,
            nvcc_release=plan.nvcc.release,
            cuda_root=plan.nvcc.root,
            cudart=_find_cudart(plan.nvcc.root),
            torch_root=plan.torch.root,
            cxx=cxx,
            ccache=shutil.which("ccache"),
            threads=resources.nvcc_threads(env),
            lineinfo=switches.flag("FLASH_ATTN_LINEINFO", env),
            strict=strict,
        )

    @property
    def launcher(self) -> str:
        return f"{self.ccache} " if self.ccache else ""


def _find_cxx(env: Mapping[str, str]) -> str:
    asked = env.get("CXX", "").strip()
    if asked and not shutil.which(asked, path=env.get("PATH")):
        raise BuildError(f'CXX is "{asked}"; accepted: a C++ compiler on PATH, or the path of one.')
    found = asked or shutil.which("g++") or shutil.which("c++")
    if not found:
        raise BuildError("No C++ compiler found: install g++, or set CXX.")
    return found


def _python_include() -> Path:
    return Path(sysconfig.get_path("include"))


def _find_cudart(root: Path) -> Path:
    # pip's CUDA packages have only the versioned name; a toolkit has both.
    for folder in ("lib64", "lib", "targets/*/lib"):
        for library in sorted(root.glob(f"{folder}/libcudart.so*")):
            return library
    raise BuildError(f"libcudart.so is missing from the CUDA toolkit in {root}.")


@dataclass(frozen=True)
class NinjaFile:
    """Paths below `root` are written relative to it, so that an object that ccache has from one
    checkout serves another."""

    root: Path
    folder: Path
    tools: Toolchain

    def write(self, sources: Sources, library: Path) -> Path:
        lines = [
            "ninja_required_version = 1.8",
            f"builddir = {self._rel(self.folder)}",
            "",
            *self._kernel_rule(),
            *self._host_rule(),
            *self._link_rule(),
            *self._edges(sources, library),
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "build.ninja"
        text = "\n".join(lines) + "\n"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return path

    def _rel(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def _includes(self, *system: Path) -> str:
        own = [self.root / "csrc", self.root]
        flags = [f"-I{self._rel(path)}" for path in own]
        return " ".join(flags + [f"-isystem {self._rel(path)}" for path in system])

    def _kernel_rule(self) -> list[str]:
        tools = self.tools
        flags = [*DEVICE_FLAGS, self._includes(*(self.root / path for path in CUTLASS_INCLUDES))]
        flags.append(f"--threads={tools.threads}")
        flags += ["-lineinfo"] if tools.lineinfo else []
        # The release stands in the command so that another compiler recompiles everything.
        checker = (
            f"{sys.executable} -m build_tools.compile_kernel --name $name --object $out "
            f"--nvcc-release {tools.nvcc_release} $options"
        )
        nvcc = f"{tools.launcher}{tools.nvcc} -c $in -o $out -MD -MF $out.d"
        return [
            "rule kernel",
            f"  command = {checker} -- {nvcc} {' '.join(flags)} $gencode",
            "  description = nvcc $name",
            "  depfile = $out.d",
            "  deps = gcc",
            "",
        ]

    def _host_rule(self) -> list[str]:
        tools = self.tools
        includes = self._includes(
            tools.torch_root / "include", _python_include(), tools.cuda_root / "include"
        )
        flags = " ".join([*HOST_FLAGS, *(["-Werror"] if tools.strict else []), *ABI_FLAGS])
        return [
            "rule host",
            f"  command = {tools.launcher}{tools.cxx} -c $in -o $out -MD -MF $out.d "
            f"{flags} {includes}",
            "  description = c++ $in",
            "  depfile = $out.d",
            "  deps = gcc",
            "",
        ]

    def _link_rule(self) -> list[str]:
        torch_lib = self._rel(self.tools.torch_root / "lib")
        flags = [*LINK_FLAGS, *(f"'-Wl,-rpath,{path}'" for path in RUNTIME_PATHS)]
        flags += [f"-L{torch_lib}", "-ltorch", "-ltorch_cpu", "-lc10", str(self.tools.cudart)]
        return [
            "rule link",
            f"  command = {self.tools.cxx} $in -o $out {' '.join(flags)}",
            "  description = link $out",
            "",
        ]

    def _edges(self, sources: Sources, library: Path) -> list[str]:
        lines, objects = [], []
        for source in sources.kernels:
            objects.append(self._rel(object_path(self.folder, source.path)))
            options = ["--strict"] if self.tools.strict else []
            options += [f"--allow-spills {row}={n:g}" for row, n in source.allow_spills.items()]
            lines += [
                f"build {objects[-1]}: kernel {self._rel(source.path)}",
                f"  name = {source.path.stem}",
                f"  options = {' '.join(options)}",
                f"  gencode = {' '.join(source.gencode)}",
            ]
        for path in sources.host:
            objects.append(self._rel(object_path(self.folder, path)))
            lines.append(f"build {objects[-1]}: host {self._rel(path)}")
        target = self._rel(library)
        inputs = f"{' '.join(objects)} | build_tools/exports.map"
        return [*lines, f"build {target}: link {inputs}", f"default {target}"]
