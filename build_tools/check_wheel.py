"""Checks that a wheel keeps its promise: any Python >= 3.10 and torch >= 2.10, each GPU asked for.

`python -m build_tools.check_wheel dist/*.whl`. Each file of kernels must have code for every
architecture of FLASH_ATTN_CUDA_ARCHS. Each symbol the library takes from elsewhere must
belong to torch's stable C interface, CUDA's runtime, Python's limited API, or the C and C++
libraries; one mangled name of c10, at or torch would tie it to the torch it was built with. No
wheel is larger than 60 MB.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from build_tools.object_file import device_code
from build_tools.plan import REQUEST, parse_archs
from build_tools.targets import OWN_CODES, codes, common_targets

EXTENSION = "flash_attn/_C.abi3.so"
TAG = re.compile(r"-cp310-abi3-manylinux_2_\d+_(x86_64|aarch64)\.whl$")
INIT = "PyInit__C"
MEGABYTES = 60

ALLOWED = {
    "torch's stable C interface": re.compile(r"(aoti_torch_|torch_)[a-z0-9_]+$"),
    "CUDA runtime": re.compile(r"(__)?cuda[A-Z]\w*$"),
    # Names with a leading underscore are private, but for a few that the limited API's macros use.
    "Python limited API": re.compile(
        r"Py_?[A-Z]\w*$|_Py_(Dealloc|(None|True|False|NotImplemented)Struct)$"
    ),
}
# The dynamic linker's and compiler's own; weak, so that they may be absent.
RUNTIME = re.compile(r"(_ITM_\w+|__gmon_start__|__cxa_finalize)$")
SYSTEM_VERSION = re.compile(r"@+(GLIBC|GLIBCXX|CXXABI|GCC)_[\w.]+$")


@dataclass(frozen=True)
class Symbols:
    undefined: list[str]
    exported: list[str]


def read_symbols(library: Path) -> Symbols:
    lines = subprocess.run(
        ["nm", "--dynamic", "--with-symbol-versions", str(library)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    undefined, exported = [], []
    for line in lines:
        kind, name = line.split()[-2:]
        (undefined if kind in "Uwv" else exported).append(name)
    return Symbols(undefined, exported)


def foreign(undefined: list[str]) -> list[str]:
    """The symbols that no allowed library has."""
    return [name for name in undefined if not _allowed(name)]


def _allowed(name: str) -> bool:
    if SYSTEM_VERSION.search(name):
        return True
    bare = name.split("@")[0]
    return bool(RUNTIME.match(bare)) or any(p.match(bare) for p in ALLOWED.values())


def problems(library: Path) -> list[str]:
    symbols = read_symbols(library)
    found = [f"depends on {name}, not a stable interface" for name in foreign(symbols.undefined)]
    others = [name for name in symbols.exported if name.split("@")[0] != INIT]
    found += [f"exports {name}, but only {INIT} should be visible" for name in others]
    if INIT not in {name.split("@")[0] for name in symbols.exported}:
        found.append(f"does not export {INIT}")
    return found


def system_needs(library: Path) -> str:
    """The newest version of each system library's symbols, e.g. "GLIBC 2.34, GLIBCXX 3.4.30"."""
    newest: dict[str, tuple[int, ...]] = {}
    for name in read_symbols(library).undefined:
        version = re.search(r"@+(GLIBC|GLIBCXX|CXXABI)_([\d.]+)$", name)
        if version:
            number = tuple(map(int, version[2].split(".")))
            newest[version[1]] = max(number, newest.get(version[1], (0,)))
    return ", ".join(f"{name} {'.'.join(map(str, v))}" for name, v in sorted(newest.items()))


def code_lines(library: Path) -> list[str]:
    """What GPU code is in it, e.g. "compute_80, sm_80, sm_90 in 15 files of kernels"."""
    kinds = Counter(", ".join(sorted(file)) for file in device_code(library.read_bytes()))
    return [f"{kind} in {count} files of kernels" for kind, count in kinds.items()]


def missing_code(library: Path, archs: Sequence[str]) -> list[str]:
    """One sentence for each architecture whose code is missing in some file."""
    files = device_code(library.read_bytes())
    portable = [file for file in files if not file <= OWN_CODES]
    own = OWN_CODES.intersection(f"sm_{arch}" for arch in archs)
    found = [f"has no {code} code" for code in sorted(own.difference(*files))]
    for code in sorted(codes(common_targets(archs))):
        without = sum(code not in file for file in portable)
        if without or not portable:
            found.append(f"has no {code} code in {without} of {len(portable)} files of kernels")
    return found


def check(wheel: Path, archs: Sequence[str] = ()) -> list[str]:
    """archs: what it was built for, as in a plan; none: whatever it has will do."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if re.search(r"\.so[.\d]*$", name)]
        if wheel.name.endswith("-py3-none-any.whl"):
            return [f"is pure Python, but contains {name}" for name in libraries]
        found = [] if TAG.search(wheel.name) else ["is not tagged cp310-abi3-manylinux_2_…"]
        size = wheel.stat().st_size / 1e6
        if size > MEGABYTES:
            found.append(f"has {size:.1f} MB, more than {MEGABYTES}")
        if libraries != [EXTENSION]:
            return [*found, f"contains {libraries}, not just {EXTENSION}"]
        with tempfile.TemporaryDirectory() as folder:
            library = Path(archive.extract(EXTENSION, folder))
            print(f"{wheel.name}: {size:.1f} MB, needs {system_needs(library)}")
            print(*(f"{wheel.name}: {line}" for line in code_lines(library)), sep="\n")
            return found + problems(library) + missing_code(library, archs)


def main(argv: list[str]) -> int:
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2
    request = os.environ.get(REQUEST, "").strip().lower()
    archs = () if request in ("", "native", "none") else parse_archs(request)
    failed = False
    for wheel in map(Path, argv):
        sentences = check(wheel, archs)
        failed |= bool(sentences)
        print(*(f"{wheel.name} {sentence}" for sentence in sentences or ["is fine"]), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
