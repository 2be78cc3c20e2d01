"""The operations of the gated delta rule: schemas, fakes, autograd, and what serves a call.

``flash_attn::delta_forward`` and ``delta_step`` run the compiled kernels where ``_kernels`` says
that the library serves the call. All else runs on torch operations, on any device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn.dispatch import run
from flash_attn.dispatch.autograd import records, refuse_tangents, rows_contiguous
from flash_attn.dispatch.define import defined
from flash_attn.linear import _chunks, _delta, _delta_step, _k_tiles, _kernels, ops
from flash_attn.linear._autocast import without_autocast

__all__ = ["SCHEMAS", "backward", "forward", "step"]

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, float scale"
)
SCHEMAS = {
    # normalizes: q and k are divided by their norms. The backward is given them as they are then.
    "delta_forward": (
        f"({_INPUTS}, bool normalizes, bool output_final_state, bool state_v_first) -> "
        "(Tensor o, Tensor final_state)"
    ),
    "delta_backward": (
        f"({_INPUTS}, Tensor do, Tensor? dfinal_state) -> (Tensor dq, Tensor dk, Tensor dv, "
        "Tensor dg, Tensor dbeta, Tensor dinitial_state)"
    ),
    # One token a row, q [B, HK, K], v [B, H, V], g, beta [B, H]; writes state [slots, H, K, V].
    "delta_step": (
        "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, Tensor? slots, "
        "float scale, bool normalizes, float of_sigmoid) -> Tensor o"
    ),
}

_library = defined(SCHEMAS)
_scan = torch.ops.flash_attn.delta_forward.default
backward = torch.ops.flash_attn.delta_backward.default
_one_token = torch.ops.flash_attn.delta_step.default


def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """The operation; raises for forward-mode derivatives, which it would drop. Where autograd has
    nothing to record, past its kernel, as ``ops.scan``."""
    refuse_tangents(*args[:6])
    if run.traced() or records(*args[:6]):
        return _scan(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _scan(*args)


def step(*args: Any) -> Tensor:
    """The operation, which has no derivative."""
    refuse_tangents(*args[:6])
    return _one_token(*args)


def _call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *rest: Any) -> _delta.Delta:
    return _delta.Delta(_chunks.Scan(q, k, v, g, *rest), beta)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, _normalizes, output_final_state, v_first = args
    scan = _call(*inputs).scan
    final = ops.empty_state(scan, v_first) if output_final_state else ops.nothing(scan)
    return torch.empty_like(scan.v, memory_format=torch.contiguous_format), final


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, normalizes, with_final, v_first = args
    call = _call(*inputs)
    scan = call.scan
    served = _kernels.serves("_linear_delta_forward", scan.q, scan.v, scan.g) and scan.v.numel()
    if not served:
        with without_autocast(scan.q):
            o, state = _delta.forward(_normalized(call) if normalizes else call)
        _, final = _fake_forward(*args)
        return o, final.copy_(state) if final.dim() == 4 else final
    final = ops.empty_state(scan, v_first) if with_final else None
    o, state = _k_tiles.written(scan.v, scan.cu_seqlens), _kernels.laid_well(final)
    q, k, v = (rows_contiguous(x) for x in (scan.q, scan.k, scan.v))
    g, beta = (_of_token(x, q) for x in (scan.g, call.beta))
    initial = _kernels.laid_well(scan.initial_state)
    rest = initial, scan.cu_seqlens, scan.scale, normalizes, o, state
    _kernels.delta_forward(q, k, v, g, beta, *rest)
    if final is None:
        return o, ops.nothing(scan)
    return o, final if state is final else final.copy_(state)


def _normalized(call: _delta.Delta) -> _delta.Delta:
    q, k = (_delta_step.normalized(x) for x in (call.scan.q, call.scan.k))
    return call._replace(scan=call.scan._replace(q=q, k=k))


def _of_token(x: Tensor, q: Tensor) -> Tensor:
    """g or beta [B, T, H] or [B, H] as kernels take it."""
    return (x if x.dtype == q.dtype else x.float()).contiguous()


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    *inputs, _do, _dfinal_state = args
    call = _call(*inputs)
    scan = call.scan
    given = (scan.q, scan.k, scan.v, scan.g, call.beta)
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    state = scan.initial_state
    return *found, ops.nothing(scan) if state is None else torch.empty_like(state)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    *inputs, do, dfinal_state = args
    call = _call(*inputs)
    with without_autocast(call.scan.q):
        found = _delta.backward(call, do, dfinal_state)
    dq, dk = (ops.of_shared(x, of) for x, of in ((found.dq, call.scan.q), (found.dk, call.scan.k)))
    *_, dstate = _fake_backward(*args)
    if dstate.dim() == 4:
        dstate.copy_(found.dinitial_state)
    dg, dbeta = found.dg.to(call.scan.g.dtype), found.dbeta.to(call.beta.dtype)
    return dq, dk, found.dv, dg, dbeta, dstate


def _run_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor,
    slots: Tensor | None, *rest: Any,
) -> Tensor:  # fmt: skip
    name = "_linear_delta_step"
    if v.numel() and ops.in_place(name, state) and _kernels.serves(name, q, v, g):
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        q, k, v = (rows_contiguous(x) for x in (q, k, v))
        g, beta = (None if x is None else _of_token(x, q) for x in (g, beta))
        slots = None if slots is None else slots.contiguous()
        _kernels.delta_step(q, k, v, g, beta, state, slots, *rest, o)
        return o
    return _delta_step.step(q, k, v, g, beta, state, slots, *rest)


def _fake_step(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


for _name, _serve, _fake in (
    ("delta_forward", _forward, _fake_forward),
    ("delta_backward", _backward, _fake_backward),
    ("delta_step", _run_step, _fake_step),
):
    _library.impl(_name, _serve, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_attn::{_name}", _fake, lib=_library)


def _save_inputs(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *inputs, ctx.normalizes, output_final_state, v_first = inputs
    ops.save_inputs(ctx, (*inputs, output_final_state, v_first), output)


def _gradients(ctx: Any, do: Tensor | None, dfinal_state: Tensor | None) -> tuple:
    if do is None and dfinal_state is None:
        return (None,) * 11
    q, k, v, *rest = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    dfinal_state = dfinal_state if ctx.output_final_state else None
    normal = [_delta_step.normalized(x) if ctx.normalizes else x for x in (q, k)]
    found = list(backward(*normal, v, *rest, ctx.scale, do, dfinal_state))
    if ctx.normalizes:
        found[:2] = [_delta_step.normalized_backward(x, dx) for x, dx in zip((q, k), found)]
    wanted = [x if needed else None for x, needed in zip(found, ctx.needs_input_grad)]
    return *wanted, None, None, None, None, None


torch.library.register_autograd(
    "flash_attn::delta_forward", _gradients, setup_context=_save_inputs, lib=_library
)
torch.library.register_autograd(
    "flash_attn::delta_backward", ops.no_second_derivative, lib=_library
)
