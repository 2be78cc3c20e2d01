"""QKV-packed arguments: one tensor that holds q, k, v (or k, v), and its gradient without a copy.

``unpack`` hands out slices. The backward of attention sees that its inputs are neighbours in one
tensor and writes their gradients as neighbours in one buffer; the backward of ``unpack`` sees that
too and returns the buffer. Neither relies on the other: where the pattern does not hold (a hook
replaced a gradient, a slice was used twice), ``unpack`` stacks the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn.api import checks


def checked(packed: Tensor, name: str, rank: int) -> tuple[Tensor, ...]:
    """The slices of an argument "qkv" or "kv" that has ``rank`` dimensions."""
    checks.qkv_packed(packed, name, len(name), rank)
    return unpack(packed)


def unpack(packed: Tensor) -> tuple[Tensor, ...]:
    """``(..., n, heads, head_dim)`` → n slices ``(..., heads, head_dim)`` that share its memory."""
    if packed.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Unpack.apply(packed)
    # A compiler sees unbind and stack and plans the memory itself.
    return packed.unbind(-3)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed: Tensor) -> tuple[Tensor, ...]:
        return packed.unbind(-3)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        # With create_graph=True a view of the first gradient would depend on that one alone.
        step = None if torch.is_grad_enabled() else neighbour_step(gradients)
        if step is not None:
            first = gradients[0]
            size = (*first.shape[:-2], len(gradients), *first.shape[-2:])
            stride = (*first.stride()[:-2], step, *first.stride()[-2:])
            packed = first.as_strided(size, stride)
            if packed.is_contiguous():
                return packed
        return torch.stack(gradients, dim=-3)


def neighbour_step(tensors: Sequence[Tensor]) -> int | None:
    """The distance in elements between slices of one tensor, or None if they are no such slices."""
    first = tensors[0]
    if type(first) is not Tensor or torch._is_functional_tensor(first):
        return None  # traced: storage says nothing
    step = tensors[1].storage_offset() - first.storage_offset()
    if step <= 0:
        return None
    storage = first.untyped_storage()._cdata
    for i, tensor in enumerate(tensors):
        if (
            tensor.untyped_storage()._cdata != storage
            or tensor.storage_offset() != first.storage_offset() + i * step
            or tensor.shape != first.shape
            or tensor.stride() != first.stride()
            or tensor.dtype != first.dtype
        ):
            return None
    return step


def empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Buffers for dq, dk, dv: neighbours in memory where the inputs are, None where not wanted."""
    want_q, want_k, want_v = wanted
    if want_k and want_v:
        if want_q and neighbour_step((q, k, v)) is not None:
            dq, dk, dv = _empty_packed(q, 3)
            return dq, dk, dv
        if neighbour_step((k, v)) is not None:
            dk, dv = _empty_packed(k, 2)
            return _empty(q) if want_q else None, dk, dv
    return (
        _empty(q) if want_q else None,
        _empty(k) if want_k else None,
        _empty(v) if want_v else None,
    )


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)  # half of new_empty's time


def _empty_packed(x: Tensor, n: int) -> tuple[Tensor, ...]:
    return x.new_empty((*x.shape[:-2], n, *x.shape[-2:])).unbind(-3)
