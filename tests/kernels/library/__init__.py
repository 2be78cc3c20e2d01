"""The library's CUDA operations, csrc/api to kernels, serving tensors in the host's memory."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor

from flash_attn.call import in_order
from flash_attn.dispatch import calls, direct, encode, fp8, ops, rotary
from flash_attn.linear import _kernels as linear
from tests import host_build
from tests.kernels import build

NAMESPACE = "flash_attn_host"
HALF = (torch.float16, torch.bfloat16)
# Shared memory of a block and SMs, for each compute capability: few SMs make kernels persistent.
DEVICES = {80: (166912, 4), 90: (232448, 3), 120: (101376, 4)}
L2_BYTES = 40 << 20  # cuda_on_host.cpp

_SCHEMAS = ops.SCHEMAS | rotary.SCHEMAS | fp8.SCHEMAS | encode.SCHEMAS | linear.SCHEMAS

_library: torch.library.Library | None = None
_path = ""
_module: ModuleType | None = None  # flash_attn._C of it
_functions: dict = {}  # as direct._functions


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, sm: int) -> Iterator[None]:
    """Until it ends, calls with CPU tensors run the kernels for `sm` instead of flash_attn.cpu.

    What the kernels would never be given (float32, say) skips the test.
    """
    ctypes.CDLL(_load()).use_device(sm, *DEVICES[sm])
    # Kernels move 16 bytes at a time, wherever they run.
    monkeypatch.setattr(calls, "_on_gpu", lambda q: q.dtype in HALF)
    monkeypatch.setattr(direct, "_functions", _functions)
    monkeypatch.setattr(linear, "on_gpu", lambda q: True)
    monkeypatch.setattr(fp8, "_on_gpu", lambda q: True)
    monkeypatch.setattr(encode, "on_gpu", lambda q: True)
    monkeypatch.setattr(fp8, "has_kernel", True)
    monkeypatch.setattr(fp8, "is_hopper", lambda device: sm == 90)
    monkeypatch.setattr(linear, "_registered", set(_linear_operations()))
    library = _in_place_of_the_cpu()
    try:
        yield
    finally:
        library._destroy()


def _load() -> str:
    """Once; the path of the module."""
    global _library, _path
    if _library is not None:
        return _path
    # First, because what is defined stays defined: after a skip the next test would do it again.
    path = host_build.load_or_skip(build.load).__file__
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
    _library, _path = library, path
    _take_functions()
    return _path


def _in_place_of_the_cpu() -> torch.library.Library:
    """Until it is destroyed. It leaves no frame behind: warnings name the line that calls us."""
    library = torch.library.Library("flash_attn", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for names, refused in ((ops.CPU, _refused), (rotary.CPU, _refused_rotary)):
            for name in names:
                library.impl(name, _or_skip(name, refused), "CPU", allow_override=True)
        for name in fp8.CPU | encode.CPU:
            kernel = getattr(getattr(torch.ops, NAMESPACE), name)
            library.impl(name, kernel.default, "CPU", allow_override=True)
        for name in _linear_operations():
            library.impl(name, getattr(getattr(torch.ops, NAMESPACE), name).default, "CPU")
    return library


def _linear_operations() -> list[str]:
    """Those of linear attention that the library has."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in linear.SCHEMAS if has_kernel(f"{NAMESPACE}::{name}", "CPU")]


def module() -> ModuleType:
    """What flash_attn._C is of a library for GPUs."""
    global _module
    if _module is None:
        make = ctypes.PyDLL(_load()).PyInit__C
        make.restype = ctypes.py_object
        _module = make()
    return _module


def _take_functions() -> None:
    """For direct calls of the operations, of which those that kernels refuse are none."""
    functions = module()
    assert direct.reach_tensors(functions)
    for name in ops.CPU | rotary.CPU | fp8.CPU | encode.CPU:
        operation = getattr(torch.ops.flash_attn, name)
        function = _unless_refused(name, getattr(functions, name))
        entry = function, in_order(operation.default._schema)
        _functions[operation] = _functions[operation.default] = entry


def _unless_refused(name: str, function: Callable) -> Callable:
    refused = _refused_rotary if name in rotary.CPU else _refused
    return lambda *args: NotImplemented if refused(name, args) else function(*args)


def _or_skip(name: str, refused: Callable) -> Callable:
    kernel = getattr(getattr(torch.ops, NAMESPACE), name)

    def call(*args, **kwargs):
        if reason := refused(name, args):
            pytest.skip(f"kernels {reason}")
        return kernel(*args, **kwargs)

    return call


def _refused(name: str, args: tuple) -> str:
    operands = args[2:3] if name == "_merge_attention" else args[:3]
    if name in fp8.CPU | encode.CPU:
        return ""
    if operands[0].dtype not in HALF:
        return f"do not take {operands[0].dtype}"
    if any(_has_chunks(name, x) and x.shape[-1] % 8 for x in operands):
        return "take head dims that are multiples of 8"
    return ""


def _has_chunks(name: str, x: Tensor | None) -> bool:
    """Whether this operand's rows have to be; those of a cache need not."""
    if not isinstance(x, Tensor) or x.dim() <= 2:
        return False
    return name != "_flash_attn_with_kvcache" and not ("varlen" in name and x.dim() == 4)


def _refused_rotary(name: str, args: tuple) -> str:
    dtype = args[0].dtype
    return "" if dtype in rotary.KERNEL_DTYPES else f"do not take {dtype}"
