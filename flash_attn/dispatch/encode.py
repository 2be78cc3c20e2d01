"""The operations that make codes of q, k and v, or of queries: schemas, and what serves a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn import backend
from flash_attn.call import FP8
from flash_attn.dispatch import (
    direct,
    ops,  # noqa: F401  loads the compiled library
    run,
)
from flash_attn.dispatch.define import defined

__all__ = ["Codes", "make_codes", "make_query_codes"]

_NAME, _OF_QUERIES = "_make_codes", "_make_query_codes"
SCHEMAS = {
    _NAME: (
        "(Tensor q, Tensor k, Tensor v, bool smooth_k) -> (Tensor q_codes, Tensor k_codes, "
        "Tensor v_codes, Tensor q_descale, Tensor k_descale, Tensor v_descale, Tensor k_mean)"
    ),
    _OF_QUERIES: (
        "(Tensor q, Tensor cu_seqlens_q, SymInt heads_kv) -> (Tensor q_codes, Tensor q_descale)"
    ),
}
#: What the kernel moves at a time; csrc/passes/encode.
_COLUMNS, _MOST_COLUMNS, _BYTES = 16, 256, 16
_KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16})

_library = defined(SCHEMAS)


def _on_torch(q: Tensor, k: Tensor, v: Tensor, smooth_k: bool) -> tuple[Tensor, ...]:
    from flash_attn import cpu  # which a GPU never needs

    return cpu.make_codes(q, k, v, smooth_k)


def _queries_on_torch(q: Tensor, cu_seqlens_q: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
    from flash_attn import cpu

    return cpu.make_query_codes(q, cu_seqlens_q, heads_kv)


CPU = {_NAME: _on_torch, _OF_QUERIES: _queries_on_torch}
for _name, _function in CPU.items():
    _library.impl(_name, _function, "CPU")
_operation = torch.ops.flash_attn._make_codes.default
_of_queries = torch.ops.flash_attn._make_query_codes.default


class Codes(NamedTuple):
    """Codes of q (b, sq, h, d), k (b, sk, hk, d) and v (b, sk, hk, dv), contiguous; descales
    (b, hk), float32; the mean of the keys, (b, 1, hk, d) float32, without rows if none was taken
    off."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    k_mean: Tensor


def _fake(q: Tensor, k: Tensor, v: Tensor, smooth_k: bool) -> tuple[Tensor, ...]:
    codes = [torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format)
             for x in (q, k, v)]  # fmt: skip
    descales = [k.new_empty((k.shape[0], k.shape[2]), dtype=torch.float32) for _ in codes]
    means = 1 if smooth_k and k.shape[1] else 0
    mean = k.new_empty((k.shape[0], means, *k.shape[2:]), dtype=torch.float32)
    return *codes, *descales, mean


def _fake_of_queries(q: Tensor, cu_seqlens_q: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(q, dtype=FP8, memory_format=torch.contiguous_format)
    return codes, q.new_empty((cu_seqlens_q.shape[0] - 1, heads_kv), dtype=torch.float32)


torch.library.register_fake(f"flash_attn::{_NAME}", _fake, lib=_library)
torch.library.register_fake(f"flash_attn::{_OF_QUERIES}", _fake_of_queries, lib=_library)
_is_compiled: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_attn::{_NAME}", "CUDA")
if not _is_compiled:
    for _name, _function in CPU.items():
        _library.impl(_name, _function, "CUDA")
# Asked once, because a compiler cannot follow what asks the library.
_serves: bool = _is_compiled and not backend.cuda_problem()
direct.register(_operation)
direct.register(_of_queries)


def make_codes(q: Tensor, k: Tensor, v: Tensor, smooth_k: bool) -> Codes:
    """Codes and descales as docs/fp8.md has them; autograd records nothing.

    q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv): one dtype and device. smooth_k: take the
    mean off the keys.
    """
    if on_gpu(q) and all(kernel_takes(x) for x in (q, k, v)):
        return Codes(*run.without_gradient(_operation, q, k, v, smooth_k))
    with torch.no_grad():
        return Codes(*_on_torch(q, k, v, smooth_k))


def make_query_codes(q: Tensor, cu_seqlens_q: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
    """Codes of varlen queries (total_q, h, d) that ``kernel_takes``, and a descale for each
    sequence and KV head, (b, heads_kv): its largest number becomes the largest code. Rows of no
    sequence get any codes."""
    return run.without_gradient(_of_queries, q, cu_seqlens_q, heads_kv)


def on_gpu(q: Tensor) -> bool:
    return q.is_cuda and _serves


def kernel_takes(x: Tensor) -> bool:
    columns = x.shape[-1]
    if x.dtype not in _KERNEL_DTYPES or columns % _COLUMNS or columns > _MOST_COLUMNS:
        return False
    if x.stride(-1) != 1 or any(n > 1 and s % 8 for n, s in zip(x.shape[:-1], x.stride())):
        return False
    if torch.compiler.is_compiling():  # which knows of no offset; the operation refuses odd ones
        return True
    if run.traced() or type(x) is not Tensor:
        return x.storage_offset() * x.element_size() % _BYTES == 0
    return x.data_ptr() % _BYTES == 0
