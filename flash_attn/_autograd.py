"""Autograd of the two forward operations: one path, driven by the argument names they share.

``torch.library.register_autograd`` does not take keyword-only tensors (``s_aux``), so the kernels
for the Autograd key are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn import _packed, _versions, backend

# Inputs of the varlen forward for which there is no backward.
_FORWARD_ONLY = ("block_table", "leftpad_k")


class _Call(NamedTuple):
    """One forward on its way onto the tape."""

    run: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
    backward: Callable[..., Tensor]
    shared: dict[str, Any]  # what the backward takes under the name the forward has for it
    forward_only: list[str]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, call: _Call):
        out, lse, S_dmask, rng_state = call.run()
        shared = call.shared
        shared["rng_state"] = rng_state if shared["dropout_p"] > 0 else None
        tensors = {name: value for name, value in shared.items() if isinstance(value, Tensor)}
        ctx.save_for_backward(q, k, v, out, lse, s_aux, *tensors.values())
        ctx.tensor_names = tuple(tensors)
        ctx.options = {name: value for name, value in shared.items() if name not in tensors}
        ctx.backward_op = call.backward
        ctx.forward_only = call.forward_only
        ctx.mark_non_differentiable(S_dmask, rng_state)
        ctx.set_materialize_grads(False)
        return out, lse, S_dmask, rng_state

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None, *_):
        if ctx.forward_only:
            names = " and ".join(ctx.forward_only)
            raise NotImplementedError(f"flash_attn: there is no backward through {names}")
        if dout is None and dlse is None:
            return (None,) * 5
        with torch.no_grad():
            gradients = _Attention.gradients(ctx, dout, dlse)
        # With create_graph=True: an error if, and only if, somebody differentiates them.
        return _no_second_derivative(gradients) if torch.is_grad_enabled() else gradients

    @staticmethod
    def gradients(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """dq, dk, dv, ds_aux, None."""
        q, k, v, out, lse, s_aux, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else rows_contiguous(dout)
        dlse = None if dlse is None else dlse.contiguous()
        dq, dk, dv = _packed.empty_gradients(q, k, v, ctx.needs_input_grad[:3])
        ds_aux = torch.empty_like(s_aux) if ctx.needs_input_grad[3] else None
        _versions.call(
            ctx.backward_op, dout, q, k, v, out, lse, dq, dk, dv, **ctx.options,
            **dict(zip(ctx.tensor_names, tensors)), dlse=dlse, s_aux=s_aux, ds_aux=ds_aux,
        )  # fmt: skip
        return dq, dk, dv, ds_aux, None


def call(operation: Callable[..., Any], q, k, v, *args, s_aux: Tensor | None, **kwargs):
    """``backend.call`` of a forward operation.

    Where nothing is recorded it goes past the autograd kernel below: a trip through Python that
    would only pass the arguments on, and half the cost of the dispatch.
    """
    if torch.compiler.is_compiling() or _records(q, k, v, s_aux) or _in_forward_mode():
        return backend.call(operation, q, k, v, *args, s_aux=s_aux, **kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        return backend.call(operation, q, k, v, *args, s_aux=s_aux, **kwargs)


def _records(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)


def _in_forward_mode() -> bool:
    """Forward-mode derivatives do not exist; autograd.Function says so, an operation drops them."""
    return forward_ad._current_level >= 0


def _no_second_derivative(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    wanted = [x.detach().requires_grad_() for x in gradients if x is not None]
    message = b"flash_attn has no second derivative"
    delayed = iter(torch._C._functions.DelayedError(message, len(wanted))(*wanted))
    return tuple(None if x is None else next(delayed) for x in gradients)


def rows_contiguous(x: Tensor) -> Tensor:
    """Kernels take any strides with a unit last one; a gradient that autograd expanded has none.

    On CUDA rows also have to start at a multiple of 16 bytes.
    """
    if x.stride()[-1] != 1:
        return x.contiguous()
    if x.is_cuda:
        if any(stride * x.itemsize % 16 for stride in x.stride()[:-1]):
            return x.contiguous()
        if type(x) is Tensor and x.data_ptr() % 16:
            return x.clone(memory_format=torch.contiguous_format)
    return x


def register(library: torch.library.Library, name: str, forward, backward) -> None:
    """Makes the operation ``forward`` differentiable by the operation ``backward``."""
    arguments = forward._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    own = {"q", "k", "v", "s_aux"}
    shared = [a.name for a in backward._schema.arguments if a.name in names and a.name not in own]

    def below_autograd(keyset, args, kwargs):
        keyset = keyset & torch._C._after_autograd_keyset
        with torch._C._AutoDispatchBelowAutograd():
            return backend.call(forward.redispatch, keyset, *args, **kwargs)

    def kernel(keyset, *args, **kwargs):
        q, k, v = args[:3]
        s_aux = kwargs.get("s_aux")
        if not _records(q, k, v, s_aux) and not _in_forward_mode():
            return below_autograd(keyset, args, kwargs)
        # The dispatcher leaves out arguments that equal their defaults.
        bound = {**defaults, **dict(zip(names, args)), **kwargs}
        call = _Call(
            run=lambda: below_autograd(keyset, args, kwargs),
            backward=backward,
            shared={key: bound[key] for key in shared},
            forward_only=[key for key in _FORWARD_ONLY if bound.get(key) is not None],
        )
        return _Attention.apply(q, k, v, s_aux, call)

    library.impl(name, kernel, "Autograd", with_keyset=True)
