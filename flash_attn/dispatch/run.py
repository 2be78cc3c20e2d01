"""Which way a call takes to its operation. Nothing else decides it.

1. A compiler or a transform of torch.func looks on: the operation, as torch dispatches it. Below a
   transform another level of autograd may record the call, which the tensor does not show.
2. Autograd records the call: as in 3, but the results become those of a node (``autograd.record``).
   This goes past the kernels for the Autograd key, which are Python, too, and half the cost of the
   dispatch.
3. Otherwise the direct path; what that does not serve goes through torch's dispatcher, below the
   keys whose work is done here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn import backend
from flash_attn.dispatch import autograd, direct, versions


def traced() -> bool:
    """Whether a compiler or a transform of torch.func looks on."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def forward(operation: Callable, inputs: Sequence[Tensor | None], args: tuple, kwargs: dict):
    """A forward operation; ``inputs`` may be differentiated in."""
    if traced():
        return backend.call(operation, *args, **kwargs)
    below = torch._C._AutoDispatchBelowAutograd
    if autograd.records(*inputs):
        run = functools.partial(_recorded, operation, args, kwargs)
        return autograd.record(operation, run, args, kwargs)
    return _eager(operation, below, args, kwargs)


def without_gradient(operation: Callable[..., Any], *args, **kwargs):
    """An operation that writes nothing, of which autograd records nothing."""
    if traced():
        return backend.call(operation, *args, **kwargs)
    return _eager(operation, torch._C._AutoDispatchBelowAutograd, args, kwargs)


def _recorded(operation: Callable[..., Any], args: tuple, kwargs: dict, in_order: tuple):
    """A forward whose results become a node's. in_order: its arguments, in the schema's order."""
    results = direct.call_in_order(operation, in_order)
    return _unless_direct(results, operation, torch._C._AutoDispatchBelowAutograd, args, kwargs)


def into_new(operation: torch._ops.OpOverload, in_order: tuple):
    """An operation that writes new tensors, which nothing else has seen: their writes need not be
    counted. Autograd records nothing of it. in_order: its arguments, in the schema's order."""
    is_traced = traced()
    if not is_traced:
        results = direct.call_in_order(operation, in_order)
        if results is not NotImplemented:
            return results
    arguments = operation._schema.arguments
    positional = sum(not argument.kwarg_only for argument in arguments)
    named = zip((argument.name for argument in arguments[positional:]), in_order[positional:])
    args, kwargs = in_order[:positional], dict(named)
    if is_traced:
        return backend.call(operation, *args, **kwargs)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return backend.call(operation, *args, **kwargs)


def writing(operation: Callable[..., Any], *args, **kwargs):
    """Runs an operation that writes its arguments; autograd records nothing."""
    if traced():
        return backend.call(operation, *args, **kwargs)
    results = _eager(operation, torch._C._AutoDispatchBelowADInplaceOrView, args, kwargs)
    versions.count(operation, args, kwargs)
    return results


def _eager(operation: Callable[..., Any], below: Callable[[], Any], args: tuple, kwargs: dict):
    return _unless_direct(direct.call(operation, args, kwargs), operation, below, args, kwargs)


def _unless_direct(
    results: Any, operation: Callable[..., Any], below: Callable[[], Any], args: tuple, kwargs: dict
):
    """The results of the direct path; where it does not serve the call, the dispatcher's."""
    if results is not NotImplemented:
        return results
    with below():
        return backend.call(operation, *args, **kwargs)
