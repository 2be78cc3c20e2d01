"""Decides what a build makes: the Python package alone, or kernels for which architectures."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from build_tools import probe
from build_tools.probe import BuildError, Gpu, Nvcc, Torch

REQUEST = "FLASH_ATTN_CUDA_ARCHS"

# C++20 in device code together with gcc 13, the compiler of current long-term distributions.
MIN_NVCC = (12, 4)
# The first release whose stable ABI covers what csrc/api needs.
MIN_TORCH = (2, 10)
# cp.async and bf16 mma.sync; there is no kernel family below it.
MIN_CAPABILITY = 80

WITHOUT_KERNELS = f"set {REQUEST}=none to install the CPU backend alone"


@dataclass(frozen=True)
class Plan:
    """archs is empty for a pure Python build; then nvcc and torch are None."""

    archs: tuple[str, ...]
    reason: str
    nvcc: Nvcc | None = None
    torch: Torch | None = None


@dataclass(frozen=True)
class Probes:
    """How a plan looks at the machine; tests put fakes here."""

    nvcc: Callable[[Mapping[str, str]], Nvcc | None] = probe.find_nvcc
    gpus: Callable[[], list[Gpu]] = probe.find_gpus
    torch: Callable[[Mapping[str, str]], Torch | None] = probe.find_torch
    codes: Callable[[Nvcc], set[str]] = field(default=probe.gpu_codes)


def make_plan(env: Mapping[str, str] = os.environ, probes: Probes | None = None) -> Plan:
    """Raises BuildError when kernels are wanted and cannot be built here."""
    probes = probes or Probes()
    request = env.get(REQUEST, "").strip().lower()
    if request == "none":
        return Plan((), f"{REQUEST}=none")
    if request and request != "native":
        archs, reason = parse_archs(request), f"{REQUEST}={request}"
        nvcc = probes.nvcc(env)
    else:
        gpus = probes.gpus()
        if not gpus:
            if request == "native":
                raise BuildError(f"{REQUEST}=native, but nvidia-smi shows no GPU.")
            return Plan((), f"no GPU, and {REQUEST} asks for none")
        nvcc = probes.nvcc(env)
        if nvcc is None and not request:
            return Plan((), f"a GPU ({gpus[0].name}) but no nvcc")
        usable = [gpu for gpu in gpus if _code(gpu) >= MIN_CAPABILITY]
        if not usable:
            oldest = f"{gpus[0].name} is sm_{_code(gpus[0])}"
            return Plan((), f"{oldest}, and kernels need sm_{MIN_CAPABILITY} or newer")
        archs = tuple(sorted({_arch(_code(gpu)) for gpu in usable}, key=arch_number))
        reason = ", ".join(sorted({gpu.name for gpu in usable}))
    return _checked(archs, reason, nvcc, probes.torch(env), probes.codes)


def parse_archs(request: str) -> tuple[str, ...]:
    """ "80;90a", "8.0 9.0" and "sm_80,sm_90a" → ("80", "90a")."""
    archs = []
    for word in re.split(r"[;,\s]+", request.strip()):
        match = re.fullmatch(r"(?:sm_|compute_)?(\d+)(?:\.(\d))?(a|f)?", word)
        if not match:
            raise BuildError(f'{REQUEST} has "{word}"; accepted: a list such as "80;90a", or none.')
        number = int(match[1] + (match[2] or ""))
        if number < MIN_CAPABILITY:
            raise BuildError(
                f'{REQUEST} has "{word}", but kernels need sm_{MIN_CAPABILITY} (Ampere) or newer.'
            )
        archs.append(_arch(number))
    return tuple(dict.fromkeys(archs))


def arch_number(arch: str) -> int:
    return int(arch.rstrip("af"))


def _code(gpu: Gpu) -> int:
    return int(gpu.capability.replace(".", ""))


def _arch(number: int) -> str:
    # wgmma and setmaxnreg exist only in the architecture-specific set of Hopper.
    return "90a" if number == 90 else str(number)


def _checked(archs, reason, nvcc, torch, codes) -> Plan:
    wanted = f"kernels for {', '.join('sm_' + arch for arch in archs)} ({reason})"
    if nvcc is None:
        raise BuildError(
            f"No nvcc found for {wanted}: put it on PATH, set CUDA_HOME, or {WITHOUT_KERNELS}."
        )
    if nvcc.version < MIN_NVCC:
        raise BuildError(
            f"nvcc {nvcc.release} ({nvcc.path}) is too old for {wanted}: "
            f"at least {_dotted(MIN_NVCC)} is needed, or {WITHOUT_KERNELS}."
        )
    unknown = [arch for arch in archs if str(arch_number(arch)) not in codes(nvcc)]
    if unknown:
        raise BuildError(
            f"nvcc {nvcc.release} ({nvcc.path}) cannot compile for sm_{unknown[0]} ({reason}): "
            f"install a newer CUDA toolkit, or {WITHOUT_KERNELS}."
        )
    if torch is None:
        raise BuildError(
            f"No torch found for {wanted}: install torch >= {_dotted(MIN_TORCH)} first, "
            f"set FLASH_ATTN_TORCH_DIR to its folder, or {WITHOUT_KERNELS}."
        )
    if torch.release < MIN_TORCH:
        raise BuildError(
            f"torch {torch.version} ({torch.root}) is too old for {wanted}: "
            f"at least {_dotted(MIN_TORCH)} is needed, or {WITHOUT_KERNELS}."
        )
    # A torch without CUDA fits any toolkit: its headers are the same, and only they are used.
    if torch.cuda and int(torch.cuda.split(".")[0]) != nvcc.version[0]:
        raise BuildError(
            f"nvcc {nvcc.release} ({nvcc.path}) and torch {torch.version}, built for CUDA "
            f"{torch.cuda}, differ in CUDA's major version: point CUDA_HOME at a CUDA "
            f"{torch.cuda.split('.')[0]} toolkit, install a torch for CUDA {nvcc.version[0]}, "
            f"or {WITHOUT_KERNELS}."
        )
    return Plan(archs, reason, nvcc, torch)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
