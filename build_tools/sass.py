"""Dumps the machine code of compiled kernels: `make sass FILTER=bf16_d128`.

One file per kernel file and architecture goes to build/sass, and a table of what is in it to the
screen: the instructions that say most about an attention kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from build_tools.cuda_tools import cuda_tool
from build_tools.probe import BuildError

OBJECTS = Path("build/cuda/obj")
OUTPUT = Path("build/sass")
# Tensor cores; exponentials; loads from and to shared memory; local memory, which means spills or
# an array indexed at run time.
COUNTED = ("HMMA", "HGMMA", "MUFU", "LDSM", "LDS", "STS", "LDGSTS", "LDL", "STL", "BAR")

_CODE = re.compile(r"^\s*code for (sm_\w+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)")


def dump(tool: Path, obj: Path) -> dict[str, str]:
    """Machine code by architecture, e.g. {"sm_80": …}."""
    search = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}  # cuobjdump calls nvdisasm
    text = subprocess.run(
        [tool, "-sass", obj],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **search},
    ).stdout
    parts: dict[str, list[str]] = {}
    code = None
    for line in text.splitlines():
        found = _CODE.match(line)
        code = found[1] if found else code
        if code:
            parts.setdefault(code, []).append(line)
    return {code: "\n".join(lines) + "\n" for code, lines in parts.items()}


def count(text: str) -> Counter:
    words = (_INSTRUCTION.match(line) for line in text.splitlines())
    return Counter(word[1] for word in words if word)


def main(argv: list[str]) -> int:
    wanted = argv[0] if argv else ""
    objects = sorted(path for path in OBJECTS.glob("*.cu.o") if wanted in path.name)
    if not objects:
        print(
            f'No object file in {OBJECTS} matches "{wanted}" (make build first).', file=sys.stderr
        )
        return 1
    try:
        tool = cuda_tool("cuobjdump")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for obj in objects:
        for code, text in sorted(dump(tool, obj).items()):
            path = OUTPUT / f"{obj.name.removesuffix('.cu.o')}.{code}.sass"
            path.write_text(text)
            counts = count(text)
            shown = ", ".join(f"{name} {counts[name]}" for name in COUNTED if counts[name])
            print(f"{path}: {sum(counts.values())} instructions: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
