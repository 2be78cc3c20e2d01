"""Which machine code each source file is compiled to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from build_tools.plan import arch_number

# Families of kernels and the architecture each is written for. A newer GPU without a family of its
# own runs the newest older one, so every file that can run there gets machine code for it.
FAMILIES = {"sm80": "80", "sm90": "90a"}
# Architecture-specific code ("a") runs on its own GPU only, so it has no PTX for later ones.
PORTABLE = frozenset({"sm80"})
# Kernels that start beside the launch before them where they can: what csrc/core/early_launch.h
# says needs sm_90's instructions, so Hopper's code is not from sm_80's.
OVERLAPPING = frozenset({"decode"})
# Machine code of the families that run on one GPU.
OWN_CODES = frozenset(f"sm_{arch}" for name, arch in FAMILIES.items() if name not in PORTABLE)


def targets(row, archs: Sequence[str]) -> list[str]:
    """nvcc's -gencode flags for the kernel of one table row; empty if no asked GPU runs it."""
    if row.arch not in PORTABLE:
        return _own_targets(row.arch, archs)
    # Also for a GPU with a family of its own, where FLASH_ATTN_ARCH forces these to compare them.
    flags = common_targets(archs)
    if row.direction in OVERLAPPING:
        flags = [_gencode("90", "sm_90") if "sm_90" in flag else flag for flag in flags]
    return flags


def common_targets(archs: Sequence[str]) -> list[str]:
    """Flags for what every GPU runs: a portable row, a checked-in .cu file."""
    # All from one virtual architecture: the front end, which takes nearly all of the time, then
    # runs once, and the kernels use nothing newer anyway.
    base = FAMILIES["sm80"]
    flags = [_gencode(base, f"sm_{code}") for code in dict.fromkeys(map(_plain, archs))]
    # PTX makes a library that is given away run on GPUs that come later. A build for this machine's
    # GPU does without: it is never moved.
    if base in archs:
        flags.append(_gencode(base, f"compute_{base}"))
    return flags


def folder_targets(path: Path, archs: Sequence[str]) -> list[str]:
    """Flags for a checked-in .cu file, by the family whose folder it is in; empty if no asked GPU
    runs it."""
    own = [name for name in FAMILIES if name in path.parts and name not in PORTABLE]
    return _own_targets(own[0], archs) if own else common_targets(archs)


def _own_targets(family: str, archs: Sequence[str]) -> list[str]:
    arch = FAMILIES[family]
    return [_gencode(arch, f"sm_{arch}")] if arch in archs else []


def codes(flags: Sequence[str]) -> set[str]:
    """What -gencode flags ask for, e.g. {"sm_80", "compute_80"}."""
    return {flag.rpartition("code=")[2] for flag in flags}


def _plain(arch: str) -> str:
    return str(arch_number(arch))


def _gencode(virtual: str, code: str) -> str:
    # Not -gencode: ccache takes it for one of -g, whose objects belong to one directory.
    return f"--generate-code=arch=compute_{virtual},code={code}"
