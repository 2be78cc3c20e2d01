"""The operations of linear attention: schemas, fakes, autograd, and what serves a call.

``flash_attn::linear_forward`` and ``linear_backward`` run the compiled kernels where ``_kernels``
says that the library serves the call, and torch operations (``_chunks``) on any device otherwise.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attn import backend
from flash_attn.dispatch import run
from flash_attn.dispatch.autograd import records, refuse_tangents, rows_contiguous
from flash_attn.dispatch.define import defined
from flash_attn.linear import _chunks, _k_tiles, _kernels, _step
from flash_attn.linear._autocast import without_autocast

__all__ = [
    "SCHEMAS", "backward", "empty_state", "forward", "in_place", "nothing", "of_shared", "scan",
    "step",
]  # fmt: skip

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, "
    "float scale"
)
SCHEMAS = {
    # final_state [N, H, K, V] lies as [N, H, V, K] in memory with state_v_first; without
    # output_final_state it has no elements.
    "linear_forward": (
        f"({_INPUTS}, bool output_final_state, bool state_v_first) -> "
        "(Tensor o, Tensor final_state)"
    ),
    # dg and dinitial_state have no elements where they are not wanted.
    "linear_backward": (
        f"({_INPUTS}, Tensor do, Tensor? dfinal_state, bool with_dg, bool with_dinitial_state) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dinitial_state)"
    ),
    # One token a row, q [B, HK, K], v [B, H, V]; writes state [slots, H, K, V].
    "linear_step": (
        "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor(a!) state, Tensor? slots, float scale) "
        "-> Tensor o"
    ),
}

_library = defined(SCHEMAS)
forward = torch.ops.flash_attn.linear_forward.default
backward = torch.ops.flash_attn.linear_backward.default
_one_token = torch.ops.flash_attn.linear_step.default


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, slots: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """The operation, which has no derivative."""
    refuse_tangents(q, k, v, g, state)
    return _one_token(q, k, v, g, state, slots, scale)


def scan(*args: Any) -> tuple[Tensor, Tensor]:
    """``forward``. Where autograd has nothing to record, past its kernel, which is Python and two
    thirds of the dispatch."""
    refuse_tangents(*args[:5])
    if run.traced() or records(*args[:5]):
        return forward(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return forward(*args)


# --- Results without data -------------------------------------------------------------------------


def empty_state(scan: _chunks.Scan, v_first: bool) -> Tensor:
    heads, columns = scan.v.shape[2:]
    cu_seqlens, channels = scan.cu_seqlens, scan.k.shape[-1]
    sequences = scan.v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if v_first:
        return scan.v.new_empty((sequences, heads, columns, channels), dtype=scan.dtype()).mT
    return scan.v.new_empty((sequences, heads, channels, columns), dtype=scan.dtype())


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, output_final_state, v_first = args
    scan = _chunks.Scan(*inputs)
    final = empty_state(scan, v_first) if output_final_state else nothing(scan)
    return torch.empty_like(scan.v, memory_format=torch.contiguous_format), final


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *inputs, _do, _dfinal_state, with_dg, with_dinitial_state = args
    scan = _chunks.Scan(*inputs)
    dense = torch.contiguous_format
    dq, dk, dv = (torch.empty_like(x, memory_format=dense) for x in (scan.q, scan.k, scan.v))
    dg, dstate = nothing(scan), nothing(scan)
    if with_dg and scan.g is not None:
        dg = torch.empty_like(scan.g, memory_format=dense)
    if with_dinitial_state and scan.initial_state is not None:
        dstate = torch.empty_like(scan.initial_state)
    return dq, dk, dv, dg, dstate


def nothing(scan: _chunks.Scan) -> Tensor:
    return scan.q.new_empty(0, dtype=scan.dtype())


# --- Which way a call takes -----------------------------------------------------------------------


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, output_final_state, v_first = args
    scan = _chunks.Scan(*inputs)
    final = empty_state(scan, v_first) if output_final_state else None
    served = _kernels.serves("_linear_forward", scan.q, scan.v, scan.g) and scan.v.numel()
    with without_autocast(scan.q):
        if served:
            o = _k_tiles.forward(scan, final)
        else:
            o, state = _chunks.forward(scan)
            if final is not None:
                final.copy_(state)
    return o, nothing(scan) if final is None else final


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *inputs, do, dfinal_state, with_dg, with_dinitial_state = args
    scan = _chunks.Scan(*inputs)
    with_dg = with_dg and scan.g is not None
    served = _kernels.serves("_linear_backward", scan.q, scan.v, scan.g) and scan.v.numel()
    with without_autocast(scan.q):
        if served:
            found = _k_tiles.backward(scan, do, dfinal_state, with_dg, with_dinitial_state)
        else:
            found = _chunks.backward(scan, do, dfinal_state, with_dg)
    dq, dk = of_shared(found.dq, scan.q), of_shared(found.dk, scan.k)
    dg, dstate = nothing(scan), nothing(scan)
    if scan.g is not None and found.dg is not None:
        per_token = found.dg if scan.g.dim() == 4 or found.dg.dim() == 3 else found.dg.squeeze(-1)
        dg = per_token.sum((0, 1)) if scan.g.dim() == 1 else per_token
        dg = dg.to(scan.g.dtype).contiguous()
    if with_dinitial_state and scan.initial_state is not None:
        dstate = torch.empty_like(scan.initial_state).copy_(found.dinitial_state)
    return dq, dk, found.dv, dg, dstate


def of_shared(gradient: Tensor, x: Tensor) -> Tensor:
    """[B, T, H, K] -> x's [B, T, HK, K]: the sum over the heads that share one of x."""
    if gradient.shape[2] != x.shape[2]:
        shared = gradient.shape[2] // max(1, x.shape[2])
        gradient = gradient.unflatten(2, (x.shape[2], shared)).sum(3)
    return gradient.to(x.dtype)


def _run_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, slots: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    name = "_linear_step"
    if v.numel() and in_place(name, state) and _kernels.serves(name, q, v, g):
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        q, k, v = (rows_contiguous(x) for x in (q, k, v))
        g = None if g is None else g.contiguous()
        slots = None if slots is None else slots.contiguous()
        _kernels.step(q, k, v, g, state, slots, scale, o)
        return o
    return _step.step(q, k, v, g, state, slots, scale)


def in_place(operation: str, state: Tensor) -> bool:
    """Whether kernels write a state where it lies."""
    served = state.dtype == torch.float32 and _kernels.lies_well(state)
    if backend.LOG and state.is_cuda and not served:
        backend.trace(f"{operation}: torch operations, because the state is not fp32 in runs")
    return served


def _fake_step(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


for _name, _serve, _fake in (
    ("linear_forward", _forward, _fake_forward),
    ("linear_backward", _backward, _fake_backward),
    ("linear_step", _run_step, _fake_step),
):
    _library.impl(_name, _serve, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_attn::{_name}", _fake, lib=_library)


# --- Autograd -------------------------------------------------------------------------------------


def save_inputs(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.output_final_state, _v_first = inputs
    ctx.save_for_backward(*tensors)
    if not ctx.output_final_state:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, dfinal_state: Tensor | None) -> tuple:
    q, k, v, g, initial_state, cu_seqlens = ctx.saved_tensors
    if do is None and dfinal_state is None:
        return (None,) * 9
    needs = ctx.needs_input_grad
    do = torch.zeros_like(v) if do is None else do
    found = backward(
        q, k, v, g, initial_state, cu_seqlens, ctx.scale, do,
        dfinal_state if ctx.output_final_state else None, needs[3], needs[4],
    )  # fmt: skip
    wanted = [x if needed else None for x, needed in zip(found, needs)]
    return *wanted, None, None, None, None


def no_second_derivative(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError("flash_attn.linear has no second derivative")


torch.library.register_autograd(
    "flash_attn::linear_forward", _gradients, setup_context=save_inputs, lib=_library
)
torch.library.register_autograd("flash_attn::linear_backward", no_second_derivative, lib=_library)
