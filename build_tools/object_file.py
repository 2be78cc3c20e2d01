"""Reads integer constants out of an object file: what only the C++ compiler knows.

ELF64, little-endian, as on every system that CUDA runs on.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

_SYMBOL_TABLE = 2  # sh_type


def shared_memory(obj: Path) -> dict[str, int]:
    """Bytes of dynamic shared memory by row: the `smem_…` constants of a generated file."""
    constants = int_constants(obj.read_bytes())
    named = {re.fullmatch(r"_ZN5flash\d+smem_(\w+)E", name): n for name, n in constants.items()}
    return {match[1]: n for match, n in named.items() if match}


def int_constants(elf: bytes) -> dict[str, int]:
    """Every symbol of four bytes with its value; none for a file that is no ELF object."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return {}
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    # (name, type, flags, address, offset, size, link, info, alignment, entry size)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + size * i) for i in range(count)]
    found = {}
    for _, kind, _, _, begin, length, link, *_ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        strings = sections[link][4]
        for at in range(begin, begin + length, 24):
            name, _, _, section, value, symbol_size = struct.unpack_from("<IBBHQQ", elf, at)
            if symbol_size == 4 and 0 < section < count:
                text = elf[strings + name : elf.index(b"\0", strings + name)].decode()
                (found[text],) = struct.unpack_from("<i", elf, sections[section][4] + value)
    return found
