"""Finds the compiled library, says why it cannot be used, and answers for what is missing."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from flash_attn import _load_errors, _log, _switches
from flash_attn.api import refusals

_MODULE = "flash_attn._C"
_MISS = "flash_attn: not implemented: "
_OUT_OF_MEMORY = "CUDA out of memory."
_MINIMUM_SM = 80

#: The compiled library once loaded, else None.
library: Any = None
#: Why there is no compiled library; empty when it is loaded.
why_not_loaded: str = "backend.load() has not run"

_switches.check_arch()
CHECK = bool(_switches.flag("FLASH_ATTN_CHECK"))
LOG = _log.start()
trace: Callable[[str], None] = _log.trace


def library_path() -> Path:
    return Path(__file__).with_name("_C.abi3.so")


def load() -> None:
    """Loads the compiled library if there is one; never raises."""
    global library, why_not_loaded
    library = None
    path = library_path()
    if not path.exists():
        why_not_loaded = f"{path} does not exist: this installation was built without CUDA kernels"
        return
    try:
        library = importlib.import_module(_MODULE)
        why_not_loaded = ""
        if LOG:
            library.trace_to(trace)
    except ImportError as error:
        why_not_loaded = _load_errors.explain(path, str(error))


def cuda_problem() -> str:
    """Why CUDA tensors cannot be served at all; empty when the library is usable."""
    if library is None:
        return why_not_loaded
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) has no CUDA"
    built_for = library.cuda_version() // 1000
    if built_for != int(torch.version.cuda.split(".")[0]):
        return (
            f"flash_attn was built for CUDA {built_for} and torch {torch.__version__} uses CUDA "
            f"{torch.version.cuda}: install a build for the same CUDA major version"
        )
    return ""


def compiled_variants() -> list[dict[str, Any]]:
    """One row per compiled kernel, as in the variant table; empty without a compiled library."""
    return [] if library is None else json.loads(library.compiled_variants())


def device_code(sm: int) -> str:
    """What a GPU (80, 89, …) runs of the library: "machine code", what the driver compiles from
    "PTX", or "none" of it."""
    return "none" if library is None else library.device_code(sm)


def describe_variants() -> str:
    rows = compiled_variants()
    if not rows:
        return "no CUDA kernels are compiled"
    return f"{len(rows)} CUDA kernels are compiled: " + ", ".join(row["name"] for row in rows)


_missing: set[str] = set()


def has_kernel(operation: str) -> bool:
    """Whether the compiled library implements an operation."""
    return operation not in _missing


def missing_kernel(operation: str) -> Callable[..., NoReturn]:
    """The CUDA implementation of an operation that has none: it says so."""
    _missing.add(operation)

    def raise_missing(*args, **kwargs) -> NoReturn:
        reason = cuda_problem() or "the compiled library has no kernel for it yet"
        raise NotImplementedError(
            f"flash_attn: {operation} cannot run on CUDA tensors: {reason}; "
            f"{describe_variants()}. CPU tensors are served by the built-in CPU backend."
        )

    return raise_missing


def call(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls an operation; what the compiled library reports is told as ``translated`` says."""
    try:
        return operation(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        told = translated(error)
        if told is error:
            raise  # with its own cause
        raise told from None


def translated(error: Exception) -> Exception:
    """C++ knows no Python types and has no words, so both are told by the message: a look-up miss
    is NotImplementedError, lack of memory the error that torch has for it, a refusal worded."""
    message = str(error)
    if type(error) not in (RuntimeError, ValueError):
        return error
    if words := refusals.worded(message):
        return ValueError(words)
    if _MISS in message:
        return NotImplementedError(_MISS + message.split(_MISS, 1)[1])
    if message.startswith(_OUT_OF_MEMORY):
        return torch.OutOfMemoryError(message)
    return error


@functools.cache
def check_gpu(device: torch.device) -> None:
    """Raises for a GPU older than any kernel family serves, and for a library of another CUDA."""
    if library is not None and cuda_problem():
        raise RuntimeError(f"flash_attn: {cuda_problem()}")
    major, minor = torch.cuda.get_device_capability(device)
    if major * 10 + minor < _MINIMUM_SM:
        name = torch.cuda.get_device_name(device)
        raise NotImplementedError(
            f"flash_attn: {device} is a {name} with compute capability {major}.{minor}; "
            "8.0 (Ampere) or newer is needed"
        )
