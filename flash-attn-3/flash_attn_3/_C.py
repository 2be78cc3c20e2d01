"""``torch.ops.flash_attn_3``: the operators of FlashAttention-3, whose import defines them.

Each is made of operations of ``flash_attn``, which have the kernels, the fake implementations and
the autograd; so these work on every device, without data, and under ``torch.compile``, and ``fwd``
is differentiable where its result is no cache's.

The schemas are what programs compare theirs with to the letter: the alias marks of k_new and v_new,
and none at the cache that is written, are in it. ``bwd`` takes ``attention_chunk`` by name as well.
"""

from __future__ import annotations

from flash_attn_3 import _beside  # noqa: F401  before what only that flash_attn has

# isort: split
import torch
from torch import Tensor

from flash_attn_3 import _combine, _private

_FWD = (
    "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0., "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_BWD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, float softcap=0., bool deterministic=False, int sm_margin=0, *, "
    "int attention_chunk=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_COMBINE = (
    "(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, "
    "ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)"
)
_METADATA = (
    "(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, "
    "int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> Tensor"
)


def _fwd(q: Tensor, k: Tensor, v: Tensor, *args, **kwargs):
    given = dict(zip(_NAMES, args)) | kwargs
    return _private._flash_attn_forward(
        q, k, v, **_NOT_GIVEN | {_PYTHON.get(name, name): x for name, x in given.items()}
    )


def _bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, *args, **kwargs,
):  # fmt: skip
    softmax_d = _private._flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, dq, dk, dv, *args, **kwargs,
    )  # fmt: skip
    return softmax_d, *(softmax_d.new_empty(0) for _ in range(4))


def _metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype,
    seqused_k, *args, **kwargs,
):  # fmt: skip
    return _combine.metadata(seqused_k)


_OPERATORS = {
    "fwd": (_FWD, _fwd),
    "bwd": (_BWD, _bwd),
    "fwd_combine": (_COMBINE, _combine.combine),
    "get_scheduler_metadata": (_METADATA, _metadata),
}


_TAKEN = (
    "torch.ops.{} is there already, of another package that serves the names of FlashAttention-3: "
    "only one can be in a program"
)


def _define() -> torch.library.Library:
    taken = [name for name in _OPERATORS if hasattr(torch.ops.flash_attn_3, name)]
    if taken:
        raise ImportError(_TAKEN.format(f"flash_attn_3.{taken[0]}"))
    try:
        library = torch.library.Library("flash_attn_3", "DEF")
    except RuntimeError as error:  # a compiled library has the namespace to itself
        raise ImportError(_TAKEN.format("flash_attn_3")) from error
    for name, (schema, function) in _OPERATORS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        # Made of other operations: these are what a tracer sees.
        library.impl(name, function, "CompositeImplicitAutograd")
    return library


_library = _define()
_SCHEMA = torch.ops.flash_attn_3.fwd.default._schema
_NAMES = [argument.name for argument in _SCHEMA.arguments[3:]]
#: What the Python function calls otherwise.
_PYTHON = {
    "q_v": "qv", "out": "out_", "is_causal": "causal",
    "is_rotary_interleaved": "rotary_interleaved",
}  # fmt: skip
#: The two have other defaults.
_NOT_GIVEN = {"rotary_interleaved": False, "num_splits": 0}
