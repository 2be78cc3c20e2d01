"""Where the compiled kernels of linear attention come in: the only module that knows them.

``flash_attn.linear.ops`` and ``delta_ops`` ask ``serves`` for each call of
``flash_attn::linear_forward``, ``linear_backward``, ``linear_step``, ``delta_forward`` and
``delta_step``; what the library does not serve runs on torch operations (``_chunks``, ``_delta``),
on any device. The compiled library registers CUDA implementations of the operations below under
their names (``_linear_forward``, …), as it does for ``flash_attn::_rotary``; an operation that it
does not register is never called. A row of ``SERVED`` says for which calls they are taken. Kernels
on the host, or stand-ins as those of ``tests/linear/test_kernels_called.py``, are implementations
for the CPU, with ``on_gpu``, ``_registered`` and ``SERVED`` replaced.

What the operations are given
    q, k            [B, T, HK, K], one dtype (bf16 or fp16), any strides with a unit last one; where
                    K is a multiple of 8, rows start at multiples of 16 bytes. v and do as well
    v               [B, T, H, V], q's dtype; H is a multiple of HK, and head h reads q's and k's
                    head h // (H / HK)
    g               log decay, natural log, in [-inf, 0], contiguous:
                    None        no decay
                    [H]         fp32, the same at every token of a head
                    [B, T, H]   fp32 or q's dtype, a scalar per token and head
                    [B, T, H, K]  fp32 or q's dtype, a vector per token and head
    initial_state   [N, H, K, V] fp32, or None for zeros. Its strides say how it lies: with
                    ``state_v_first`` it is the transposed view of a [N, H, V, K] tensor. So
                    stride(-1) or stride(-2) is 1; where that dimension is a multiple of 4, rows
                    start at multiples of 16 bytes
    cu_seqlens      [N + 1] int32 on the device, or None. With it B = 1, and sequence n is tokens
                    cu_seqlens[n] to cu_seqlens[n + 1]; empty ones are allowed, and so are tokens
                    of no sequence, before the first and after the last. Without it N = B
    scale           multiplies q
    o               [B, T, H, V] contiguous, q's dtype; the operation writes all tokens of
                    sequences. Where there are others, they are zeros before the call
    final_state     [N, H, K, V] fp32, strides as above; None where it is not wanted. Of an empty
                    sequence it is its initial state, or zeros

    do              [B, T, H, V], as v
    dfinal_state    as final_state, or None for zeros
    dq, dk          [B, T, H, K] contiguous, for each head of v: Python adds those that share a
                    head of q and k. fp32 where H != HK, else q's dtype
    dv              [B, T, H, V] contiguous, q's dtype
    dg              fp32; [B, T, H] for a g of [H] (Python adds the tokens) and of [B, T, H];
                    [B, T, H, K] for a vector; None where g is None or needs no gradient
    dinitial_state  as final_state, or None where it is not wanted
                    Tokens of no sequence are zeros before the call in all of these

    state           [slots, H, K, V] fp32, strides as above: read, decayed, written in place
    slots           [B] int32, the state of each row of a step, or None for row b's state b; a row
                    whose slot is negative reads and writes nothing, and its o is zeros. What two
                    rows with the same slot leave is undefined. A step takes fp32 as well, and q, k
                    and v of any alignment
    beta            of the delta rule: None for ones, or as g
    normalizes      q and k are divided by their norms, sqrt(Σ x² + 1e-6)
    of_sigmoid      beta is the sigmoid of what is given, times this; 0: it is as given

A call has at least one token and one element; T, K, V >= 1, nothing is padded.
The backward is given no result of the forward: it computes the states of the chunks again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn import backend
from flash_attn.dispatch import ops  # noqa: F401  loads the compiled library

__all__ = [
    "SCHEMAS", "backward", "delta_forward", "delta_step", "forward", "laid_well", "lies_well",
    "most_columns", "serves", "step",
]  # fmt: skip

SCHEMAS = {
    "_linear_forward": (
        "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, "
        "float scale, Tensor(a!) o, Tensor(b!)? final_state) -> ()"
    ),
    "_linear_backward": (
        "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, "
        "float scale, Tensor do, Tensor? dfinal_state, Tensor(a!) dq, Tensor(b!) dk, "
        "Tensor(c!) dv, Tensor(d!)? dg, Tensor(e!)? dinitial_state) -> ()"
    ),
    # One token a row: q, k [B, HK, K], v and o [B, H, V], g [H], [B, H] or [B, H, K].
    "_linear_step": (
        "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor(a!) state, Tensor? slots, float scale, "
        "Tensor(b!) o) -> ()"
    ),
    # The gated delta rule; g, beta [B, T, H].
    "_linear_delta_forward": (
        "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
        "Tensor? cu_seqlens, float scale, bool normalizes, Tensor(a!) o, "
        "Tensor(b!)? final_state) -> ()"
    ),
    # One token a row by the gated delta rule; g, beta [B, H].
    "_linear_delta_step": (
        "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, Tensor? slots, "
        "float scale, bool normalizes, float of_sigmoid, Tensor(b!) o) -> ()"
    ),
}
DTYPES = (torch.bfloat16, torch.float16)
_ANY = 1 << 30


class Served(NamedTuple):
    """Calls for which the library has kernels."""

    decays: frozenset[str]  # of "none", "head", "scalar", "vector": g is None, [H], [B,T,H], …,K]
    max_k: int = _ANY  # largest K and V
    max_v: int = _ANY
    columns: int = _ANY  # of K in one call; a vector of decays of more takes several calls
    dtypes: tuple[torch.dtype, ...] = DTYPES  # of q, k and v


_SCALARS = Served(frozenset({"none", "head", "scalar"}))
# What every GPU has room for: kVectorTilings, linear/tilings.h.
_VECTORS = Served(frozenset({"vector"}), columns=256)
_STEPS = Served(_SCALARS.decays | {"vector"}, dtypes=(*DTYPES, torch.float32))
# A CTA has all of the delta rule's state: linear/delta_rule.h and delta_step.h.
_DELTAS = Served(frozenset({"scalar"}), max_k=256)
_DELTA_STEPS = Served(frozenset({"none", "scalar"}), max_k=256, dtypes=_STEPS.dtypes)
# Operation → what its kernels take: calls that are in one of the rows. All others, and those of an
# operation that is not here or that the compiled library does not register, run on torch
# operations.
SERVED: dict[str, tuple[Served, ...]] = {
    "_linear_forward": (_SCALARS, _VECTORS),
    "_linear_backward": (_SCALARS, _VECTORS),
    "_linear_step": (_STEPS,),
    "_linear_delta_forward": (_DELTAS,),
    "_linear_delta_step": (_DELTA_STEPS,),
}

_library = torch.library.Library("flash_attn", "FRAGMENT")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
forward = torch.ops.flash_attn._linear_forward.default
backward = torch.ops.flash_attn._linear_backward.default
step = torch.ops.flash_attn._linear_step.default
delta_forward = torch.ops.flash_attn._linear_delta_forward.default
delta_step = torch.ops.flash_attn._linear_delta_step.default
_registered = {
    name
    for name in SCHEMAS
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_attn::{name}", "CUDA")
}


def decay_of(v: Tensor, g: Tensor | None) -> str:
    """The kind of decay: "none", "head", "scalar" or "vector"; v [..., H, V]."""
    if g is None:
        return "none"
    if g.dim() == 1:
        return "head"
    return "vector" if g.dim() == v.dim() else "scalar"


def lies_well(state: Tensor) -> bool:
    """Whether a state [N, H, K, V] has the strides that kernels are promised."""
    *outer, rows, columns = state.stride()
    inner = state.shape[-1] if columns == 1 else state.shape[-2]
    if columns != 1 and rows != 1:
        return False
    others = (*outer, rows if columns == 1 else columns)
    return inner % 4 != 0 or not (state.data_ptr() % 16 or any(s % 4 for s in others))


def laid_well(state: Tensor | None) -> Tensor | None:
    """The state, or a copy that lies well."""
    if state is None or lies_well(state):
        return state
    return state.clone(memory_format=torch.contiguous_format)


def on_gpu(q: Tensor) -> bool:
    """Whether the kernels reach q's memory; the tests' host kernels replace this function."""
    return q.is_cuda


def serves(operation: str, q: Tensor, v: Tensor, g: Tensor | None) -> bool:
    """Whether the library's ``operation`` takes a call of these tensors; shapes as above."""
    rows = SERVED.get(operation, ()) if on_gpu(q) and operation in _registered else ()
    served = any(_takes(row, q, v, g) for row in rows)
    if backend.LOG and q.is_cuda and not served:
        backend.trace(f"{operation}: torch operations, because no kernel serves the call")
    return served


def most_columns(operation: str, q: Tensor, v: Tensor, g: Tensor | None) -> int:
    """The columns of K that one call of ``operation`` takes, which serves these tensors."""
    return max(row.columns for row in SERVED[operation] if _takes(row, q, v, g))


def _takes(served: Served, q: Tensor, v: Tensor, g: Tensor | None) -> bool:
    if q.dtype not in served.dtypes or decay_of(v, g) not in served.decays:
        return False
    return q.shape[-1] <= served.max_k and v.shape[-1] <= served.max_v
