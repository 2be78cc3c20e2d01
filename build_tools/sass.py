"""Dumps the machine code of compiled kernels: `make sass FILTER=bf16_d128`.

One file per kernel and architecture goes to build/sass, and a table of what is in it to the screen:
the instructions that say most about an attention kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from build_tools.cuda_tools import cuda_tool
from build_tools.instantiate import kernel_name
from build_tools.probe import BuildError

OBJECTS = Path("build/cuda/obj")
OUTPUT = Path("build/sass")
# Tensor cores; exponentials; loads from and to shared memory; local memory, which means spills or
# an array indexed at run time.
COUNTED = ("HMMA", "HGMMA", "MUFU", "LDSM", "LDS", "STS", "LDGSTS", "LDL", "STL", "BAR")

_CODE = re.compile(r"^\s*code for (sm_\w+)")
_FUNCTION = re.compile(r"^\s*Function : (\w+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)")


def dump(tool: Path, obj: Path) -> dict[str, str]:
    """Machine code by kernel and architecture, e.g. {"fwd_sm80_bf16_d64_plain.sm_80": …}."""
    search = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}  # cuobjdump calls nvdisasm
    text = subprocess.run(
        [tool, "-sass", obj],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **search},
    ).stdout
    return split(text, obj.name.removesuffix(".cu.o"))


def split(text: str, stem: str) -> dict[str, str]:
    """What cuobjdump printed for the object of `stem`.cu, in parts."""
    parts: dict[str, list[str]] = {}
    code = part = None
    for line in text.splitlines():
        if found := _CODE.match(line):
            code, part = found[1], None
        elif found := _FUNCTION.match(line):
            part = f"{kernel_name(stem, found[1])}.{code}"
        if part:
            parts.setdefault(part, []).append(line)
    return {part: "\n".join(lines) + "\n" for part, lines in parts.items()}


def count(text: str) -> Counter:
    words = (_INSTRUCTION.match(line) for line in text.splitlines())
    return Counter(word[1] for word in words if word)


def main(argv: list[str]) -> int:
    wanted = argv[0] if argv else ""
    try:
        tool = cuda_tool("cuobjdump")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    parts: dict[str, str] = {}
    for obj in OBJECTS.glob("*.cu.o"):
        parts |= dump(tool, obj)
    names = sorted(name for name in parts if wanted in name)
    if not names:
        print(f'No kernel in {OBJECTS} matches "{wanted}" (make build first).', file=sys.stderr)
        return 1
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = OUTPUT / f"{name}.sass"
        path.write_text(parts[name])
        counts = count(parts[name])
        shown = ", ".join(f"{word} {counts[word]}" for word in COUNTED if counts[word])
        print(f"{path}: {sum(counts.values())} instructions: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
