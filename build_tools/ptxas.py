"""Reads what `ptxas -v` says about each kernel, and finds what means lost speed."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass

from build_tools.instantiate import kernel_name

# Messages of ptxas that cost speed without an error. Each is a sentence in its documentation or
# output, here in ours.
LOST_SPEED = {
    "C7508": "setmaxnreg is ignored",
    "C7510": "wgmma is serialised",
    "C7517": "wgmma is serialised",
    "C7518": "wgmma is serialised",
    "C7519": "wgmma is serialised",
}

# Machine code of GPUs that the table's tiles and limits were chosen for. Other code may spill some
# bytes more, also in kernels that ask for more shared memory than those GPUs have.
TUNED = frozenset({"sm_80", "sm_90", "sm_90a"})

_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>[^']+)' for '(?P<code>sm_\w+)'")
_FRAME = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers")
_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
_TIME = re.compile(r"Compile time = ([\d.]+) ms")
_CODED = re.compile(r"\((C\d{4})\)")


@dataclass
class Kernel:
    """One __global__ function compiled for one architecture."""

    name: str  # of its row in csrc/variants.py, or of its file
    symbol: str  # mangled
    code: str  # "sm_80"
    registers: int = 0
    stack: int = 0  # bytes a thread
    spill_stores: int = 0  # bytes a thread
    spill_loads: int = 0
    static_smem: int = 0  # bytes a block; dynamic shared memory is chosen at launch
    seconds: float = 0.0  # in ptxas alone

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads


def parse(text: str, stem: str) -> list[Kernel]:
    """The kernels of one file, `stem`.cu."""
    kernels: list[Kernel] = []
    in_entry = False
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            symbol = entry["symbol"]
            kernels.append(Kernel(kernel_name(stem, symbol), symbol, entry["code"]))
            in_entry = True
        elif "Function properties for" in line:
            # Device functions that were not inlined are listed too, with frames of their own.
            in_entry = bool(kernels) and line.rstrip().endswith(kernels[-1].symbol)
        elif not kernels:
            continue
        elif (frame := _FRAME.search(line)) and in_entry:
            kernels[-1].stack = int(frame["stack"])
            kernels[-1].spill_stores = int(frame["stores"])
            kernels[-1].spill_loads = int(frame["loads"])
        elif used := _USED.search(line):
            kernels[-1].registers = int(used["registers"])
            if smem := _SMEM.search(line):
                kernels[-1].static_smem = int(smem[1])
        elif time := _TIME.search(line):
            kernels[-1].seconds = float(time[1]) / 1000
    return kernels


def lost_speed(
    text: str, stem: str, allow_spills: Mapping[str, float], codes: Container[str] | None = None
) -> list[str]:
    """Sentences, one for each way in which this compilation lost speed.

    allow_spills: bytes a thread, stored and loaded, that each row of the table declares.
    codes: machine code whose spills count; None: all.
    """
    found = []
    for kernel in parse(text, stem):
        allowed = allow_spills.get(kernel.name, 0)
        if kernel.spills > allowed and (codes is None or kernel.code in codes):
            found.append(
                f"{kernel.name} for {kernel.code} spills registers "
                f"({kernel.spill_stores} bytes stored, {kernel.spill_loads} bytes loaded, "
                f"{kernel.registers} registers; {allowed:g} allowed)"
            )
    for line in text.splitlines():
        code = _CODED.search(line)
        if code and code[1] in LOST_SPEED:
            found.append(f"{LOST_SPEED[code[1]]}: {line.strip()}")
    return found
