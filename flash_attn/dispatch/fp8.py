"""The operation on codes of q, k and v: schema, and what serves a call.

On a CPU it computes in float32. On a GPU q, and without pages k and v, become 16 bits, which rounds
nothing, and ordinary operations follow. A call with ``fp8_products`` allows more rounding: on
Hopper it gets kernels that multiply codes as they are. Why these serve no other call:
docs/lab/sm90_fp8_forward.md.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn import _gpus, backend
from flash_attn.api.checks import MAX_HEAD_DIM_OF_CODES
from flash_attn.call import (
    FP8,
    UNCOUNTED,
    AllDescales,
    CodedForward,
    Contents,
    Forward,
    Scoring,
    named,
)
from flash_attn.dispatch import autograd, content_checks, direct, encode, ops, run
from flash_attn.dispatch.define import defined

__all__ = ["forward"]

_NAME = "_flash_attn_fp8_forward"
# Dense without cu_seqlens; with block_table, pages. A descale is a tensor's numbers times the one
# for all of them.
SCHEMAS = {
    _NAME: (
        "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
        "Tensor? seqused_k, Tensor? block_table, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
        "float softcap, Tensor? alibi_slopes, Tensor? s_aux, bool batch_invariant, "
        "SymInt num_splits, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
        "float q_descale_all, float k_descale_all, float v_descale_all, bool fp16_out, "
        "SymInt sm_margin=0) "
        "-> (Tensor out, Tensor softmax_lse)"
    )
}
#: A kernel's rows begin at multiples of as many bytes, and have one of them or more.
_BYTES = 16
#: Rows of the smallest TMA box: kLeastBoxRows in csrc/params/forward_tile.h.
_PAGE_ROWS = 8
#: The most queries times query heads of a sequence and KV head that are decoded: kMostDecodeRows in
#: csrc/plan/decode.cpp.
_DECODED_ROWS = 64

_library = defined(SCHEMAS)
_operation = torch.ops.flash_attn._flash_attn_fp8_forward.default
_arguments = named(_operation._schema)
_on_one_device = ops.on_one_device(_arguments)


def _on_cpu(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from flash_attn import cpu  # which a GPU never needs

    return cpu.fp8_forward(CodedForward.of(_arguments(args, kwargs)))


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    given = _on_one_device(args, kwargs)
    q, v = given["q"], given["v"]
    *batch, rows, heads, _ = q.shape
    dtype = torch.float16 if given["fp16_out"] else torch.bfloat16
    out = q.new_empty((*q.shape[:-1], ops.columns_of_out(q, v)), dtype=dtype)
    return out, q.new_empty((*batch, heads, rows), dtype=torch.float32)


def _on_cuda_without_kernel(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return by_ordinary_forward(CodedForward.of(_arguments(args, kwargs)))


CPU = {_NAME: _on_cpu}
_library.impl(_NAME, _on_cpu, "CPU")
torch.library.register_fake(f"flash_attn::{_NAME}", _fake, lib=_library)
_is_compiled: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_attn::{_NAME}", "CUDA")
#: Whether the compiled library has kernels of the operation, and may run them.
has_kernel: bool = (
    _is_compiled
    and any(row["dtype"] == "e4m3" for row in backend.compiled_variants())
    and os.environ.get("FLASH_ATTN_ARCH", "") in ("", "0", "90")
)
if not _is_compiled:
    _library.impl(_NAME, _on_cuda_without_kernel, "CUDA")
if backend.CHECK:
    content_checks.register(_library, (_NAME,))
direct.register(_operation)


# --- Which way a call takes -----------------------------------------------------------------------


def forward(call: CodedForward) -> tuple[Tensor, Tensor]:
    """out and softmax_lse, of which autograd records nothing. On CUDA out's columns may be more
    than v's, up to a multiple of 16."""
    if not _on_gpu(call.q):
        return run.without_gradient(_operation, *call.in_order())
    if not call.fp8_products or why_no_products(call, is_hopper(call.q.device)):
        return by_ordinary_forward(call)
    q = _as_kernels_read(call.q)
    k, v = (_as_kernels_read(x, call.keys.block_table is None) for x in call[1:3])
    return run.without_gradient(_operation, *call._replace(q=q, k=k, v=v).in_order())


def with_codes_of_queries(call: Forward) -> CodedForward | None:
    """A call on queries of 16 bits against pages of codes, with codes of its queries; None: it is
    to take them as they are."""
    if not _on_gpu(call.q) or why_no_codes_of_queries(call, is_hopper(call.q.device)):
        return None
    lengths = call.lengths
    q, q_descale = encode.make_query_codes(call.q, lengths.cu_seqlens_q, call.k.shape[-2])
    k_descale, v_descale, k_all, v_all = call.descales
    return _coded(call)._replace(
        q=q, descales=AllDescales(q_descale, k_descale, v_descale, 1.0, k_all, v_all)
    )


def why_no_codes_of_queries(call: Forward, hopper: bool, gpu: str | None = None) -> str:
    """Why queries of 16 bits against pages of codes are not rounded; empty: they are. gpu: a name
    that ``explain`` knows, in the place of the tensors' GPU."""
    if any(
        x is not None and x.dim() == 3 for x in (call.descales.k_descale, call.descales.v_descale)
    ):
        return "have no descales of rows"
    if call.scoring.dropout_p or call.return_softmax or call.return_max_logits:
        return "have no dropout, probabilities or largest logits"
    if call.keys.leftpad_k is not None:
        return "have no left padding"
    if _has_gradient(call.q, call.k, call.v, call.scoring.s_aux):
        return "have no gradient"
    if not encode.kernel_takes(call.q):
        return f"take queries of 16 bits whose rows begin at multiples of {_BYTES} bytes"
    return why_no_products(_coded(call), hopper) or _why_slower(call, gpu)


def _why_slower(call: Forward, gpu: str | None) -> str:
    """Whether products of codes, and the pass before them, are predicted to take longer."""
    if torch.compiler.is_compiling() or run.traced():  # which know of no numbers
        return ""
    without, with_codes = predicted_us(call, gpu)
    if with_codes < without:
        return ""
    return f"take {with_codes:.0f} µs here by prediction, and the queries as they are {without:.0f}"


def predicted_us(call: Forward, gpu: str | None) -> tuple[float, float]:
    """Of a forward against pages of codes: with its queries as they are, and with codes of them."""
    scoring, lengths, pages = call.scoring, call.lengths, call.k
    full = scoring.softcap != 0 or scoring.alibi_slopes is not None or scoring.softmax_scale <= 0
    left, right = (
        x if 0 <= x < UNCOUNTED else -1
        for x in (scoring.window_size_left, scoring.window_size_right)
    )
    name = "bf16" if call.q.dtype is torch.bfloat16 else "fp16"
    sm, sms, *memory = _of_device(call.q.device) if gpu is None else _gpus.GPUS[gpu]
    total_q, heads, head_dim = call.q.shape
    capacity = call.keys.block_table.shape[1] * pages.shape[1]
    longest_q, capacity, splits, margin = (
        min(n, UNCOUNTED) for n in (lengths.max_seqlen_q, capacity, call.num_splits, call.sm_margin)
    )
    return backend.library.chunk_us(
        sm, name, head_dim, call.v.shape[-1], full, backend.library.sms_left(sms, margin), *memory,
        lengths.batch, longest_q, capacity, total_q, -1, heads, pages.shape[-2],
        left, 0 if scoring.causal else right, splits, pages.shape[1],
        False, False, False, True, False, 0, Contents.CODES,
    )  # fmt: skip


_of_device = functools.cache(_gpus.of_device)


def _has_gradient(*inputs: Tensor | None) -> bool:
    """Whether autograd, or a transform, may record a call: the ordinary operations say what becomes
    of it."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return torch._C._are_functorch_transforms_active() or autograd.records(*inputs)


def _coded(call: Forward) -> CodedForward:
    return CodedForward(
        call.q, call.k, call.v, call.scoring, call.lengths, call.keys, call.batch_invariant,
        call.num_splits, fp16_out=call.q.dtype is torch.float16, fp8_products=True,
        sm_margin=call.sm_margin,
    )  # fmt: skip


def _on_gpu(q: Tensor) -> bool:
    return q.is_cuda


def why_no_products(call: CodedForward, hopper: bool) -> str:
    """Why no kernel multiplies the codes of a call as they are; empty: one does."""
    if not has_kernel or not hopper:
        return "need a Hopper GPU, and a library that has them"
    if max(call.q.shape[-1], call.v.shape[-1]) > MAX_HEAD_DIM_OF_CODES:
        return f"serve head dims up to {MAX_HEAD_DIM_OF_CODES}"
    if call.keys.block_table is None:
        return ""
    # Decoding, which reads codes as well, splits the keys of a few rows. A row's result is not to
    # depend on how many queries other sequences have: then all of them are served as before.
    group = call.q.shape[-2] // call.k.shape[-2]
    if call.batch_invariant or call.lengths.max_seqlen_q * group <= _DECODED_ROWS:
        return f"leave pages to decode with {_DECODED_ROWS} rows a KV head, or batch_invariant"
    # Queries of 16 bits have another way, in which decode serves the short sequences of a batch.
    if call.q.dtype is not FP8 and call.q.shape[0] * group <= _DECODED_ROWS * call.lengths.batch:
        return "leave pages to decode where most sequences have few rows"
    # Pages are not copied.
    if all(
        _is_aligned(x) and x.shape[1] % _PAGE_ROWS == 0 and _has_numbered_rows(x)
        for x in (call.k, call.v)
    ):
        return ""
    return f"take pages of a multiple of {_PAGE_ROWS} rows, at multiples of {_BYTES} bytes"


def is_hopper(device: torch.device) -> bool:
    if torch.compiler.is_compiling():  # which knows of no cache
        return _is_hopper(device)
    return _is_hopper_known(device)


def _is_hopper(device: torch.device) -> bool:
    if not torch.cuda.is_available():  # of tensors without data
        return False
    properties = torch.cuda.get_device_properties(device)
    return properties.major == 9 and properties.minor == 0


_is_hopper_known = functools.cache(_is_hopper)


def _is_aligned(x: Tensor) -> bool:
    """Whether rows are as a kernel's loads need them, as far as is known without an address."""
    if x.shape[-1] % _BYTES:
        return False
    if any(n > 1 and stride % _BYTES for n, stride in zip(x.shape[:-1], x.stride())):
        return False
    if torch.compiler.is_compiling():  # which knows of no offset; the operation refuses odd ones
        return True
    if run.traced() or type(x) is not Tensor:
        return x.storage_offset() % _BYTES == 0
    return x.data_ptr() % _BYTES == 0


def _has_numbered_rows(x: Tensor) -> bool:
    """Whether an int can number the rows of all pages, (pages, rows, hk, d)."""
    pages, rows, apart, row = x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    if pages <= 1:
        return True
    return row > 0 and apart % row == 0 and (pages - 1) * (apart // row) + rows < 2**31


def _as_kernels_read(x: Tensor, may_copy: bool = True) -> Tensor:
    """With zeros up to a head_dim that is a multiple of 16, and rows that begin at such."""
    if _is_aligned(x) or not may_copy:
        return x
    if x.shape[-1] % _BYTES:
        return F.pad(x, (0, -x.shape[-1] % _BYTES))
    return x.clone(memory_format=torch.contiguous_format)


# --- Without a kernel -----------------------------------------------------------------------------


def by_ordinary_forward(call: CodedForward) -> tuple[Tensor, Tensor]:
    """The same by the operations on 16 bits.

    Descales that are numbers become part of the scale and of out. Tensors of q and k are multiplied
    into q, which rounds it, or with pages into k_descale, which the decode kernels take as it is;
    those of v into out.
    """
    descales, scoring = call.descales, call.scoring
    scale = scoring.softmax_scale * descales.q_descale_all * descales.k_descale_all
    scoring = scoring._replace(softmax_scale=scale)
    of_scores = _product(descales.q_descale, descales.k_descale)
    # Codes are numbers of either; times a tensor they may be too large or too small for float16.
    rounds_q = of_scores is not None and call.keys.block_table is None
    dtype = torch.bfloat16 if rounds_q else call.dtype
    q = call.q.to(dtype)
    if call.keys.block_table is not None:
        named_descales = {
            "k_descale": of_scores, "v_descale": descales.v_descale,
            "v_descale_all": descales.v_descale_all,
        }  # fmt: skip
        return _ordinary(call, scoring, _padded(q), call.k, call.v, named_descales)
    if of_scores is not None:
        q = _times(call.q, 1.0, of_scores, call, dtype)
    k, v = call.k.to(dtype), call.v.to(dtype)
    out, lse = _ordinary(call, scoring, *map(_padded, (q, k, v)), {})
    return _times(out, descales.v_descale_all, descales.v_descale, call, call.dtype), lse


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a * b


def _padded(x: Tensor) -> Tensor:
    """Zeros up to a head_dim that is a multiple of 8, as kernels on 16 bits need them."""
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


def _times(
    x: Tensor, number: float, of_heads: Tensor | None, call: CodedForward, dtype: torch.dtype
) -> Tensor:
    """Rows of all query heads, (b, sq, h, …) or (total_q, h, …), times those of their KV heads,
    (b, hk), and the number. A zero stays one: a sequence without keys may have any descale."""
    if of_heads is None:
        return x.to(dtype) if number == 1.0 else (x.float() * number).to(dtype)
    scale = of_heads.repeat_interleave(call.q.shape[-2] // call.k.shape[-2], 1)  # (b, h)
    if call.lengths is None:
        scale = scale[:, None]
    elif call.lengths.batch == 0:
        return x.to(dtype)
    else:
        ends = call.lengths.cu_seqlens_q[1:]
        rows = torch.arange(x.shape[0], dtype=ends.dtype, device=ends.device)
        # Rows of no sequence are zeros, whatever they are multiplied by.
        sequence = torch.searchsorted(ends, rows, right=True).clamp(max=call.lengths.batch - 1)
        scale = scale[sequence]
    x = x.float()
    return torch.where(x == 0, x, x * (scale * number)[..., None]).to(dtype)


def _ordinary(
    call: CodedForward, scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, more: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    *scores, s_aux = scoring
    more |= {
        "s_aux": s_aux, "batch_invariant": call.batch_invariant, "sm_margin": call.sm_margin,
    }  # fmt: skip
    if call.lengths is None:
        results = run.without_gradient(ops.forward, q, k, v, *scores, False, **more)
    else:
        more["num_splits"] = call.num_splits
        args = (q, k, v, *call.lengths, *scores, False, *call.keys)
        results = run.without_gradient(ops.varlen_forward, *args, **more)
    return results[:2]
