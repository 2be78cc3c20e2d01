"""Reads an object file or a library: constants that only the C++ compiler knows, and GPU code.

ELF64, little-endian, as on every system that CUDA runs on.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

_SYMBOL_TABLE = 2  # sh_type
_FATBIN_SECTION = b".nv_fatbin"
_FATBIN = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2  # kinds of a fatbin's entries
_ARCH_SPECIFIC = 1 << 20  # of an entry's flags: sm_90a, not sm_90


def shared_memory(obj: Path) -> dict[str, int]:
    """Bytes of dynamic shared memory by row: the `smem_…` constants of a generated file."""
    constants = int_constants(obj.read_bytes())
    named = {re.fullmatch(r"_ZN5flash\d+smem_(\w+)E", name): n for name, n in constants.items()}
    return {match[1]: n for match, n in named.items() if match}


def int_constants(elf: bytes) -> dict[str, int]:
    """Every symbol of four bytes with its value; none for a file that is no ELF object."""
    sections = _sections(elf)
    found = {}
    for _, kind, _, _, begin, length, link, *_ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        strings = sections[link][4]
        for at in range(begin, begin + length, 24):
            name, _, _, section, value, symbol_size = struct.unpack_from("<IBBHQQ", elf, at)
            if symbol_size == 4 and 0 < section < len(sections):
                text = elf[strings + name : elf.index(b"\0", strings + name)].decode()
                (found[text],) = struct.unpack_from("<i", elf, sections[section][4] + value)
    return found


def device_code(elf: bytes) -> list[set[str]]:
    """What each file of kernels was compiled to, e.g. {"sm_80", "sm_90", "compute_80"}.

    nvcc makes one fatbin of a file: a header, then an entry of machine code or of PTX for each
    architecture, each with a header of its own.
    """
    found = []
    for begin, end in _named_sections(elf, _FATBIN_SECTION):
        at = begin
        while at < end:
            magic, _, header, size = struct.unpack_from("<IHHQ", elf, at)
            if magic != _FATBIN:
                at += 8  # fatbins are aligned
                continue
            found.append(set(_entries(elf, at + header, at + header + size)))
            at += header + size
    return found


def _entries(elf: bytes, at: int, end: int) -> Iterator[str]:
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", elf, at)
        (number,) = struct.unpack_from("<I", elf, at + 28)
        (flags,) = struct.unpack_from("<Q", elf, at + 40)
        if kind in (_PTX, _MACHINE_CODE):
            suffix = "a" if flags & _ARCH_SPECIFIC else ""
            yield f"{'compute' if kind == _PTX else 'sm'}_{number}{suffix}"
        at += header + size


def _sections(elf: bytes) -> list[tuple]:
    """(name, type, flags, address, offset, size, link, info, alignment, entry size) of each."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return []
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    return [struct.unpack_from("<IIQQQQIIQQ", elf, offset + size * i) for i in range(count)]


def _named_sections(elf: bytes, wanted: bytes) -> Iterator[tuple[int, int]]:
    """(begin, end) in the file."""
    sections = _sections(elf)
    (names,) = struct.unpack_from("<H", elf, 0x3E) if sections else (0,)
    for name, _, _, _, begin, size, *_ in sections:
        at = sections[names][4] + name
        if elf[at : elf.index(b"\0", at)] == wanted:
            yield begin, begin + size
