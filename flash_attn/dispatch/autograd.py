"""Autograd of the two forward operations: one path, driven by the argument names they share.

``torch.library.register_autograd`` does not take keyword-only tensors (``s_aux``), so the kernels
for the Autograd key are made here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn import backend
from flash_attn.api import qkv_packed
from flash_attn.call import in_order

try:
    from torch._C._functorch import unwrap_if_dead
except ImportError:  # a torch that has another name for it

    def unwrap_if_dead(x: Tensor) -> Tensor:
        return x


_ONLY_BACKWARD = (
    "flash_attn has the gradient that torch.autograd takes in a backward, and no other: no "
    "torch.func.grad, vjp, jvp, jacrev, jacfwd or hessian, no forward-mode derivative. Call "
    "torch.autograd.grad; under torch.vmap it works too"
)
# Inputs of the varlen forward for which there is no backward.
_FORWARD_ONLY = ("block_table", "leftpad_k", "qv")
# Saved for the backward under names of their own.
_OWN = ("q", "k", "v", "s_aux", "rng_state")
# What ``_Attention.gradients`` has for the backward, beside what both operations take.
_OF_BACKWARD = (
    "dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "rng_state", "dlse", "s_aux",
    "ds_aux",
)  # fmt: skip


class _Some(NamedTuple):
    """Some of a forward's arguments: their names, and where they are among all of them."""

    names: list[str]
    places: list[int]

    def of(self, given: tuple) -> list:
        return [given[i] for i in self.places]

    def in_use(self, given: tuple) -> list[str]:
        return [name for name, i in zip(self.names, self.places) if given[i] is not None]


class _Tape(NamedTuple):
    """What all recorded calls of one forward operation have in common."""

    backward: Callable[[tuple], Tensor]  # calls the operation, with arguments in its order
    # From what _OF_BACKWARD names, `tensors` and `options` to the backward's arguments, in order.
    in_order: Callable[[tuple], tuple]
    arrange: Callable[[tuple, dict], tuple]  # the forward's arguments, in the schema's order
    # The arguments that the backward takes too, under the same names.
    tensors: _Some
    options: _Some
    forward_only: _Some  # inputs for which there is no backward


class _Call(NamedTuple):
    """A forward that autograd is about to record."""

    run: Callable[[tuple], tuple[Tensor, Tensor, Tensor, Tensor]]  # takes `given`
    given: tuple  # all of its arguments, in the schema's order
    tape: _Tape


class _Recorded(NamedTuple):
    """What a node knows beside its tensors."""

    tape: _Tape
    options: list
    forward_only: list[str]  # names of the inputs in use for which there is no backward


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, call: _Call):
        run, given, tape = call
        out, lse, score_output, rng_state = run(given)
        # A result that the caller did not ask for has no elements, or is None after a direct call.
        drawn = rng_state if rng_state is not None and rng_state.numel() > 0 else None
        ctx.save_for_backward(q, k, v, out, lse, s_aux, drawn, *tape.tensors.of(given))
        ctx.recorded = _Recorded(tape, tape.options.of(given), tape.forward_only.in_use(given))
        if score_output is not None or rng_state is not None:
            ctx.mark_non_differentiable(*(x for x in (score_output, rng_state) if x is not None))
        ctx.set_materialize_grads(False)
        return out, lse, score_output, rng_state

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None, *_):
        recorded = ctx.recorded
        if recorded.forward_only:
            names = " and ".join(recorded.forward_only)
            raise NotImplementedError(f"flash_attn: there is no backward through {names}")
        if dout is None and dlse is None:
            return (None,) * 5
        gradients = partial(_Attention.gradients, recorded, ctx.needs_input_grad)
        return *first_derivative(gradients, dout, dlse, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx, *tangents: Tensor | None):
        raise NotImplementedError(_ONLY_BACKWARD)

    @staticmethod
    def gradients(
        recorded: _Recorded, needs: Sequence[bool], dout: Tensor | None, dlse: Tensor | None,
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, s_aux: Tensor | None,
        rng_state: Tensor | None, *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """dq, dk, dv, ds_aux."""
        dout = torch.zeros_like(out) if dout is None else rows_contiguous(dout)
        dlse = None if dlse is None else dlse.contiguous()
        dq, dk, dv = qkv_packed.empty_gradients(q, k, v, needs[:3])
        ds_aux = torch.empty_like(s_aux) if needs[3] else None
        tape, options, _ = recorded
        tape.backward(tape.in_order((
            dout, q, k, v, out, lse, dq, dk, dv, rng_state, dlse, s_aux, ds_aux,
            *tensors, *options,
        )))  # fmt: skip
        return dq, dk, dv, ds_aux


# Function.apply does more before it, which takes 2 µs: for setup_context, and for the transforms of
# torch.func, under which nothing is recorded here. Only their tensors that outlive them are left,
# which ``record`` unwraps.
_apply = super(torch.autograd.Function, _Attention).apply


def first_derivative(gradients: Callable[..., tuple], *inputs: Tensor | None) -> tuple:
    """``gradients(*inputs)`` in a backward: a further derivative of these tensors raises."""
    if torch.is_grad_enabled():  # create_graph=True
        return _Gradients.apply(gradients, *inputs)
    return gradients(*inputs)


class _Gradients(torch.autograd.Function):
    """The gradients as functions of all they depend on: to differentiate them is always an error.

    Autograd prunes a node away that depends on fewer inputs wherever these also lead elsewhere, as
    in a residual block, and the second derivative silently lacks a term.
    """

    @staticmethod
    def forward(ctx, gradients: Callable[..., tuple], *inputs: Tensor | None):
        ctx.set_materialize_grads(False)
        return gradients(*inputs)

    @staticmethod
    def backward(ctx, *wanted: Tensor | None):
        if all(x is None for x in wanted):
            return (None,) * len(ctx.needs_input_grad)
        raise RuntimeError("flash_attn has no second derivative")


def refuse_tangents(*inputs: Tensor | None) -> None:
    """Raises for an input with a forward-mode derivative, which an operation would drop."""
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise NotImplementedError(_ONLY_BACKWARD)


def records(*inputs: Tensor | None) -> bool:
    """Whether autograd records a call of these inputs. A forward-mode derivative counts: there is
    none, and autograd.Function says so, where an operation would drop it."""
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return True
    return forward_ad._current_level >= 0


def rows_contiguous(x: Tensor) -> Tensor:
    """Kernels take any strides with a unit last one; a gradient that autograd expanded has none.

    On CUDA rows also have to start at a multiple of 16 bytes.
    """
    if x.stride()[-1] != 1:
        return x.contiguous()
    if x.is_cuda:
        if not x.is_contiguous() and any(n * x.itemsize % 16 for n in x.stride()[:-1]):
            return x.contiguous()
        if type(x) is Tensor and x.data_ptr() % 16:
            return x.clone(memory_format=torch.contiguous_format)
    return x


def draw_rng_state(device: torch.device) -> Tensor:
    """[seed, offset] (2,) int64 on ``device``, from its generator: as reproducible as torch.rand.

    Drawn outside the operation: an operation stays a function of its inputs, which is what
    recomputation in activation checkpointing, compilers that merge equal calls, and graph capture
    need.
    """
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def register(library: torch.library.Library, forward, backward, run_backward: Callable) -> None:
    """Makes the operation ``forward`` differentiable by ``backward``, which itself is not.

    run_backward: calls an operation with arguments in its order, as ``run.into_new``.
    """
    names = [argument.name for argument in forward._schema.arguments]
    at_dropout_p = names.index("dropout_p")
    tape = _tape(forward, backward, run_backward)
    _tapes[forward] = _tapes[forward.overloadpacket] = tape

    def kernel(keyset, *args, **kwargs):
        q, k, v = args[:3]
        if args[at_dropout_p] > 0 and kwargs.get("rng_state") is None:
            kwargs["rng_state"] = draw_rng_state(q.device)
        run = partial(_redispatched, forward, keyset, *args, **kwargs)
        if not records(q, k, v, kwargs.get("s_aux")):
            return run()
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(_ONLY_BACKWARD)
        return record(forward, lambda _: run(), args, kwargs)

    for operation, serve in ((forward, kernel), (backward, partial(_redispatched, backward))):
        name = operation._schema.name.split("::")[1]
        library.impl(name, serve, "Autograd", with_keyset=True)


# Keys are forward operations, and their packets of overloads.
_tapes: dict[Callable[..., Any], _Tape] = {}


def _tape(forward, backward, run_backward: Callable[..., Any]) -> _Tape:
    names = [argument.name for argument in forward._schema.arguments]
    shared = [a for a in backward._schema.arguments if a.name in names and a.name not in _OWN]
    tensors = [a.name for a in shared if "Tensor" in str(a.type)]
    options = [a.name for a in shared if a.name not in tensors]
    forward_only = [name for name in _FORWARD_ONLY if name in names]

    def some(wanted: list[str]) -> _Some:
        return _Some(wanted, [names.index(name) for name in wanted])

    of_call = [*_OF_BACKWARD, *tensors, *options]
    places = [of_call.index(argument.name) for argument in backward._schema.arguments]
    return _Tape(
        backward=partial(run_backward, backward),
        in_order=operator.itemgetter(*places),
        arrange=in_order(forward._schema),
        tensors=some(tensors),
        options=some(options),
        forward_only=some(forward_only),
    )


def record(operation: Callable[..., Any], run: Callable[[tuple], tuple], args: tuple, kwargs: dict):
    """The results of ``run``, a call of a forward operation, as those of a node on the tape.

    run: takes all arguments, in the order of the schema.
    """
    tape = _tapes[operation]
    q, k, v, s_aux = *map(unwrap_if_dead, args[:3]), kwargs.get("s_aux")
    if s_aux is not None:
        s_aux = unwrap_if_dead(s_aux)
    return _apply(q, k, v, s_aux, _Call(run, tape.arrange(args, kwargs), tape))


def _redispatched(operation, keyset, *args, **kwargs):
    keyset = keyset & torch._C._after_autograd_keyset
    with torch._C._AutoDispatchBelowAutograd():
        return backend.call(operation.redispatch, keyset, *args, **kwargs)
