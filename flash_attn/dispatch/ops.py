"""The operations: schemas, fake implementations, autograd, and which Python code serves them.

Everything the library computes goes through these operations, so that ``torch.compile``, export,
activation checkpointing and dispatch modes see one stable name per forward:
``flash_attn::_flash_attn_forward`` and so on. The CPU kernels are ``flash_attn.cpu``; the CUDA
kernels register themselves from the compiled library (``flash_attn.backend`` loads it); an
operation without a CUDA kernel gets one that says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn import backend, call
from flash_attn.api import checks
from flash_attn.call import accumulation_dtype
from flash_attn.dispatch import autograd, content_checks, direct, run, versions
from flash_attn.dispatch.define import defined

__all__ = [
    "backward",
    "columns_of_out",
    "forward",
    "merge_attention",
    "on_one_device",
    "varlen_backward",
    "varlen_forward",
    "with_kvcache",
]

# What a score goes through, in the order every schema uses.
_SCORES = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes"
)
_SCORES_DEFAULTED = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None"
)
_VARLEN = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
_GRADIENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, "
)
# How many SMs a call leaves to what runs beside it.
_SM_MARGIN = "SymInt sm_margin=0"
# `deterministic` does nothing in a forward; it travels with the call to the backward it causes.
_FORWARD_TAIL = (
    "*, Tensor? s_aux=None, Tensor? rng_state=None, bool batch_invariant=False, "
    "bool deterministic=False, bool return_max_logits=False, bool max_logits_of_heads=False, "
    f"{_SM_MARGIN}"
)
# score_output: S_dmask with return_softmax; with return_max_logits the rows' largest logits, like
# softmax_lse, or with max_logits_of_heads those of heads, (h,); no call has both.
_FORWARD_RESULTS = "-> (Tensor out, Tensor softmax_lse, Tensor score_output, Tensor rng_state_out)"
# The codes of an fp8 cache are multiplied by a tensor's numbers, times the one for all of them.
_DESCALES = (
    "Tensor? k_descale=None, Tensor? v_descale=None, float k_descale_all=1.0, "
    "float v_descale_all=1.0"
)
# Queries beside the values of a latent cache: scores are (q·k + qv·v) * softmax_scale.
_QV = "Tensor? qv=None"
_BACKWARD_TAIL = f"*, Tensor? dlse=None, Tensor? s_aux=None, Tensor(d!)? ds_aux=None, {_SM_MARGIN}"

SCHEMAS = {
    "_flash_attn_forward": (
        f"(Tensor q, Tensor k, Tensor v, {_SCORES}, bool return_softmax, {_FORWARD_TAIL}) "
        f"{_FORWARD_RESULTS}"
    ),
    "_flash_attn_varlen_forward": (
        f"(Tensor q, Tensor k, Tensor v, {_VARLEN}{_SCORES_DEFAULTED}, "
        "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, "
        f"Tensor? seqused_k=None, bool zero_tensors=False, {_FORWARD_TAIL}, "
        f"SymInt num_splits=0, {_DESCALES}, {_QV}) {_FORWARD_RESULTS}"
    ),
    "_flash_attn_backward": (
        f"({_GRADIENTS}{_SCORES}, bool deterministic, Tensor? rng_state=None, "
        f"{_BACKWARD_TAIL}) -> Tensor softmax_d"
    ),
    "_flash_attn_varlen_backward": (
        f"({_GRADIENTS}{_VARLEN}{_SCORES}, bool deterministic, Tensor? rng_state=None, "
        f"bool zero_tensors=False, {_BACKWARD_TAIL}, Tensor? seqused_k=None) -> Tensor softmax_d"
    ),
    "_flash_attn_with_kvcache": (
        "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, "
        "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cache_seqlens, Tensor? cache_batch_idx, "
        "Tensor? cache_leftpad, Tensor? block_table, float softmax_scale, bool causal, "
        "SymInt window_size_left, SymInt window_size_right, float softcap, "
        "bool rotary_interleaved, Tensor? alibi_slopes, SymInt num_splits, *, Tensor? s_aux=None, "
        f"{_SM_MARGIN}, {_DESCALES}, {_QV}) -> (Tensor out, Tensor softmax_lse)"
    ),
    "_merge_attention": (
        "(Tensor(a!) out_a, Tensor(b!) lse_a, Tensor out_b, Tensor lse_b, *, "
        "Tensor(c!)? out=None) -> ()"
    ),
}

_library = defined(SCHEMAS, "DEF")

forward = torch.ops.flash_attn._flash_attn_forward
varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward
backward = torch.ops.flash_attn._flash_attn_backward
varlen_backward = torch.ops.flash_attn._flash_attn_varlen_backward
with_kvcache = torch.ops.flash_attn._flash_attn_with_kvcache
merge_attention = torch.ops.flash_attn._merge_attention


# --- Fake: shapes, dtypes and strides without data ----------------------------------------------


def columns_of_out(q: Tensor, v: Tensor) -> int:
    """Kernels write whole chunks of 8, whatever the rows of a cache are."""
    columns = v.shape[-1]
    return columns + -columns % 8 if q.is_cuda else columns


def _fake_forward(asked: call.Forward):
    q, k, lengths = asked.q, asked.k, asked.lengths
    *batch, rows, heads, _ = q.shape
    lse = q.new_empty((*batch, heads, rows), dtype=accumulation_dtype(q.dtype))
    probs_shape = (
        (*batch, heads, rows, k.shape[1])
        if lengths is None
        else (lengths.batch, heads, lengths.max_seqlen_q, lengths.max_seqlen_k)
    )
    score_output = q.new_empty(probs_shape if asked.return_softmax else (0,))
    if asked.return_max_logits:
        score_output = lse.new_empty((heads,) if asked.max_logits_of_heads else lse.shape)
    return (
        q.new_empty((*q.shape[:-1], columns_of_out(q, asked.v))),
        lse,
        score_output,
        q.new_empty(_rng_state_shape(asked), dtype=torch.int64),
    )


def _rng_state_shape(asked: call.Forward):
    if asked.scoring.dropout_p == 0:
        return (0,)
    return (2,) if asked.rng_state is None else asked.rng_state.shape


def _fake_backward(asked: call.Backward):
    lse = asked.tensors.softmax_lse
    return lse.new_empty(lse.shape)


def _fake_with_kvcache(asked: call.CacheStep):
    q = asked.q
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, columns_of_out(q, asked.cache.v_cache)))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=accumulation_dtype(q.dtype))


# --- What serves them in Python ------------------------------------------------------------------


def _on_cpu(name: str) -> Callable:
    """``flash_attn.cpu``'s function of that name; the first call imports it: a GPU never does."""

    def serve(*args: Any, **kwargs: Any) -> Any:
        from flash_attn import cpu

        return getattr(cpu, name)(*args, **kwargs)

    return serve


# Operation → the description of its calls, and what takes one, on the CPU and without data.
_DESCRIBED: dict[str, tuple[Any, Callable, Callable]] = {
    "_flash_attn_forward": (call.Forward, _on_cpu("forward"), _fake_forward),
    "_flash_attn_varlen_forward": (call.Forward, _on_cpu("varlen_forward"), _fake_forward),
    "_flash_attn_backward": (call.Backward, _on_cpu("backward"), _fake_backward),
    "_flash_attn_varlen_backward": (call.Backward, _on_cpu("varlen_backward"), _fake_backward),
    "_flash_attn_with_kvcache": (call.CacheStep, _on_cpu("with_kvcache"), _fake_with_kvcache),
}


def _taking(arguments: Callable, description: Any, serve: Callable) -> Callable:
    return lambda *args, **kwargs: serve(description.of(arguments(args, kwargs)))


def on_one_device(arguments: Callable) -> Callable:
    """``arguments`` of a call without data, whose tensors must be on one device: torch takes a call
    with some meta tensors for one without data, and no kernel sees it that would refuse it."""

    def by_name(args: tuple, kwargs: dict) -> dict[str, Any]:
        given = arguments(args, kwargs)
        for name, x in given.items():
            if isinstance(x, Tensor):
                checks.on_device_of(x, name, given["q"])
        return given

    return by_name


CPU: dict[str, Callable] = {"_merge_attention": _on_cpu("merge_attention")}
for _name, (_description, _serve, _fake) in _DESCRIBED.items():
    _arguments = call.named(getattr(torch.ops.flash_attn, _name).default._schema)
    CPU[_name] = _taking(_arguments, _description, _serve)
    _fake = _taking(on_one_device(_arguments), _description, _fake)
    torch.library.register_fake(f"flash_attn::{_name}", _fake, lib=_library)
torch.library.register_fake("flash_attn::_merge_attention", lambda *_, out=None: None, lib=_library)
for _name, _kernel in CPU.items():
    _library.impl(_name, _kernel, "CPU")


# --- Autograd and CUDA ---------------------------------------------------------------------------

for _forward, _backward in ((forward, backward), (varlen_forward, varlen_backward)):
    autograd.register(_library, _forward.default, _backward.default, run.into_new)
for _operation in (backward, varlen_backward, with_kvcache, merge_attention):
    versions.register(_library, _operation.default)

backend.load()
for _name in SCHEMAS:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_attn::{_name}", "CUDA"):
        _library.impl(_name, backend.missing_kernel(_name), "CUDA")
if backend.CHECK:
    content_checks.register(_library, SCHEMAS)
for _name in SCHEMAS:
    direct.register(getattr(torch.ops.flash_attn, _name).default)
