"""Operations past torch's dispatcher: the compiled functions themselves, for eager calls on a GPU.

A call through ``torch.ops`` takes torch 6 µs: it tries overloads, boxes twenty arguments, and asks
a dozen keys whether they take part in it; nearly always none does. This module asks all of them at
once, then calls the library's function, which refuses all but plain tensors on a GPU. A call that
it refuses goes through the dispatcher, and so does every other call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn import backend
from flash_attn.call import in_order

try:
    from torch._C import (
        _get_tracing_state,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._autograd import _profiler_enabled
except ImportError:  # a torch that has other names for them
    _can_ask = False
else:
    _can_ask = True

#: The one switch of this path: while it is False, every call goes through torch's dispatcher.
#: FLASH_ATTN_CHECK=1 turns it off, because its checks are a step in the dispatcher.
enabled: bool = not backend.CHECK

# For each operation, and for its packet of overloads: the library's function, and what puts a
# call's arguments in its order.
_functions: dict[Callable[..., Any], tuple[Callable[..., Any], Callable[[tuple, dict], tuple]]] = {}


def register(operation: torch._ops.OpOverload) -> None:
    """Lets calls of the operation be direct from now on, if the compiled library has it.

    A library for another CUDA has none: the checks in Python refuse its calls.
    """
    name = operation._schema.name.split("::")[1]
    library = backend.library
    if backend.cuda_problem() or not _can_ask:
        return
    if not (hasattr(library, name) and reach_tensors(library)):
        return
    entry = getattr(library, name), in_order(operation._schema)
    _functions[operation] = _functions[operation.overloadpacket] = entry


@functools.cache
def reach_tensors(library: Any) -> bool:
    """Tells a library how to reach tensors: as programs of AOTInductor do. False if this torch no
    longer has these functions, or has others under their names."""
    bridge = getattr(torch._C, "_aoti", None)
    to_handles = getattr(bridge, "unsafe_alloc_void_ptrs_from_tensors", None)
    to_tensors = getattr(bridge, "alloc_tensors_by_stealing_from_void_ptrs", None)
    if to_handles is None or to_tensors is None or not _there_and_back(to_handles, to_tensors):
        return False
    library.use_torch(Tensor, torch.nn.Parameter, to_handles, to_tensors)
    return True


def _there_and_back(to_handles: Callable, to_tensors: Callable) -> bool:
    """Whether a capsule without a name holds a tensor, and None stands for no tensor; torch
    promises neither."""
    x = torch.empty(0, device="cpu")
    try:
        (handle,) = to_handles([x])
        if not ctypes.pythonapi.PyCapsule_IsValid(ctypes.py_object(handle), None):
            return False
        back, nothing = to_tensors([handle, None])
    except (RuntimeError, TypeError, ValueError):
        return False
    return back is x and nothing is None


def is_on() -> bool:
    """Whether calls may be direct, and there is a library to call."""
    return enabled and bool(_functions)


def call(operation: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The operation's results, or NotImplemented where it has to go through the dispatcher.

    ``run`` does not ask while a compiler traces, or under a transform of torch.func.
    """
    found = _found(operation)
    return NotImplemented if found is None else _run(found[0], found[1](args, kwargs))


def call_in_order(operation: Callable[..., Any], arguments: tuple) -> Any:
    """The same with all arguments, in the order of the operation's schema."""
    found = _found(operation)
    return NotImplemented if found is None else _run(found[0], arguments)


def _found(operation: Callable[..., Any]) -> tuple | None:
    found = _functions.get(operation) if enabled else None
    # A mode, a profiler or a tracer observes operations.
    if (
        found is None
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _profiler_enabled()
        or _get_tracing_state()
    ):
        return None
    return found


def _run(function: Callable[..., Any], arguments: tuple) -> Any:
    try:
        return function(*arguments)
    except (RuntimeError, ValueError) as error:
        raise backend.translated(error) from None
