"""Written by python -m build_tools.stubs --write."""

from typing import Literal, overload
from collections.abc import Callable
from typing import Any
import torch
from torch import Tensor
import flash_attn_2_cuda as flash_attn_gpu
from flash_attn.call import Descale
from flash_attn.call import MaxLogits
from flash_attn.call import Window
from flash_attn.compat.functions import Applied
from flash_attn.compat.tensors import maybe_contiguous as maybe_contiguous
from flash_attn.compat.tensors import round_multiple as round_multiple
from flash_attn.dispatch.private import _flash_attn_backward as _flash_attn_backward
from flash_attn.dispatch.private import _flash_attn_forward as _flash_attn_forward
from flash_attn.dispatch.private import _flash_attn_varlen_backward as _flash_attn_varlen_backward
from flash_attn.dispatch.private import _flash_attn_varlen_forward as _flash_attn_varlen_forward

__all__ = [
    'flash_attn_func', 'flash_attn_kvpacked_func', 'flash_attn_qkvpacked_func',
    'flash_attn_varlen_func', 'flash_attn_varlen_kvpacked_func', 'flash_attn_varlen_qkvpacked_func',
    'flash_attn_with_kvcache',
]
USE_TRITON_ROCM: bool
_wrapped_flash_attn_forward: Callable[..., Any]
_wrapped_flash_attn_backward: Callable[..., Any]
_wrapped_flash_attn_varlen_forward: Callable[..., Any]
_wrapped_flash_attn_varlen_backward: Callable[..., Any]

@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[False] = False,
    q_descale: Descale = None, k_descale: Descale = None, v_descale: Descale = None,
    out_dtype: torch.dtype | None = None, fp8_products: bool = False,
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[True], return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False, q_descale: Descale = None, k_descale: Descale = None,
    v_descale: Descale = None, out_dtype: torch.dtype | None = None, fp8_products: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: Literal[True],
    return_max_logits: Literal[False] = False, q_descale: Descale = None, k_descale: Descale = None,
    v_descale: Descale = None, out_dtype: torch.dtype | None = None, fp8_products: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[True, "row"],
    q_descale: Descale = None, k_descale: Descale = None, v_descale: Descale = None,
    out_dtype: torch.dtype | None = None, fp8_products: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[True], return_softmax_lse: bool = False,
    return_max_logits: Literal[True, "row"], q_descale: Descale = None, k_descale: Descale = None,
    v_descale: Descale = None, out_dtype: torch.dtype | None = None, fp8_products: bool = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: Literal[True],
    return_max_logits: Literal[True, "row"], q_descale: Descale = None, k_descale: Descale = None,
    v_descale: Descale = None, out_dtype: torch.dtype | None = None, fp8_products: bool = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True], s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False, q_descale: Descale = None, k_descale: Descale = None,
    v_descale: Descale = None, out_dtype: torch.dtype | None = None, fp8_products: bool = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: Window, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    return_attn_probs: Literal[True], *, s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False, q_descale: Descale = None, k_descale: Descale = None,
    v_descale: Descale = None, out_dtype: torch.dtype | None = None, fp8_products: bool = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: MaxLogits = False, q_descale: Descale = None, k_descale: Descale = None,
    v_descale: Descale = None, out_dtype: torch.dtype | None = None, fp8_products: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[True], return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: Literal[True],
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[True], return_softmax_lse: bool = False,
    return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: Literal[True],
    return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True], s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: Window, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    return_attn_probs: Literal[True], *, s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False, return_max_logits: MaxLogits = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: Literal[True],
    return_softmax_lse: bool = False, return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: bool = False,
    return_softmax_lse: Literal[True], return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: Literal[True],
    return_softmax_lse: bool = False, return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: bool = False,
    return_softmax_lse: Literal[True], return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, *, return_attn_probs: Literal[True], s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Window,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    return_attn_probs: Literal[True], *, s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: MaxLogits = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Tensor | None = None, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[False] = False,
    q_descale: Descale = None, k_descale: Descale = None, v_descale: Descale = None,
    out_dtype: torch.dtype | None = None, fp8_products: bool = False, qv: Tensor | None = None,
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Tensor | None = None, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: Literal[True],
    return_softmax_lse: bool = False, return_max_logits: Literal[False] = False,
    q_descale: Descale = None, k_descale: Descale = None, v_descale: Descale = None,
    out_dtype: torch.dtype | None = None, fp8_products: bool = False, qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Tensor | None = None, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: bool = False,
    return_softmax_lse: Literal[True], return_max_logits: Literal[False] = False,
    q_descale: Descale = None, k_descale: Descale = None, v_descale: Descale = None,
    out_dtype: torch.dtype | None = None, fp8_products: bool = False, qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Tensor | None = None, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[True, "row"],
    q_descale: Descale = None, k_descale: Descale = None, v_descale: Descale = None,
    out_dtype: torch.dtype | None = None, fp8_products: bool = False, qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Tensor | None = None, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: Literal[True],
    return_softmax_lse: bool = False, return_max_logits: Literal[True, "row"],
    q_descale: Descale = None, k_descale: Descale = None, v_descale: Descale = None,
    out_dtype: torch.dtype | None = None, fp8_products: bool = False, qv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Tensor | None = None, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: bool = False,
    return_softmax_lse: Literal[True], return_max_logits: Literal[True, "row"],
    q_descale: Descale = None, k_descale: Descale = None, v_descale: Descale = None,
    out_dtype: torch.dtype | None = None, fp8_products: bool = False, qv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True], block_table: Tensor | None = None,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: bool = False,
    return_softmax_lse: bool = False, return_max_logits: Literal[False] = False,
    q_descale: Descale = None, k_descale: Descale = None, v_descale: Descale = None,
    out_dtype: torch.dtype | None = None, fp8_products: bool = False, qv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size: Window, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, return_attn_probs: Literal[True],
    block_table: Tensor | None = None, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False, q_descale: Descale = None, k_descale: Descale = None,
    v_descale: Descale = None, out_dtype: torch.dtype | None = None, fp8_products: bool = False,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: bool = False,
    return_softmax_lse: bool = False, return_max_logits: MaxLogits = False,
    q_descale: Descale = None, k_descale: Descale = None, v_descale: Descale = None,
    out_dtype: torch.dtype | None = None, fp8_products: bool = False, qv: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[True], return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: Literal[True],
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[True], return_softmax_lse: bool = False,
    return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: Literal[True],
    return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True], s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: Window, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    return_attn_probs: Literal[True], *, s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False, return_max_logits: MaxLogits = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[True], return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: Literal[True],
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[False] = False,
    return_softmax_lse: Literal[False] = False, return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: Literal[True], return_softmax_lse: bool = False,
    return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
    batch_invariant: bool = False, return_lse: bool = False, return_softmax_lse: Literal[True],
    return_max_logits: Literal[True, "row"],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True], s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False,
    return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size: Window, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, return_attn_probs: Literal[True], *,
    s_aux: Tensor | None = None, batch_invariant: bool = False, return_lse: bool = False,
    return_softmax_lse: bool = False, return_max_logits: Literal[False] = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, s_aux: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, return_softmax_lse: bool = False, return_max_logits: MaxLogits = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: Literal[False] = False, *, s_aux: Tensor | None = None,
    return_lse: Literal[False] = False, k_descale: Descale = None, v_descale: Descale = None,
    qv: Tensor | None = None,
) -> Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False, *, s_aux: Tensor | None = None,
    return_lse: Literal[True], k_descale: Descale = None, v_descale: Descale = None,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, *, return_softmax_lse: Literal[True], s_aux: Tensor | None = None,
    return_lse: bool = False, k_descale: Descale = None, v_descale: Descale = None,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None,
    rotary_cos: Tensor | None, rotary_sin: Tensor | None, cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None, block_table: Tensor | None,
    softmax_scale: float | None, causal: bool, window_size: Window, softcap: float,
    rotary_interleaved: bool, alibi_slopes: Tensor | None, num_splits: int,
    return_softmax_lse: Literal[True], *, s_aux: Tensor | None = None, return_lse: bool = False,
    k_descale: Descale = None, v_descale: Descale = None, qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False, *, s_aux: Tensor | None = None,
    return_lse: bool = False, k_descale: Descale = None, v_descale: Descale = None,
    qv: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
FlashAttnFunc: Applied
FlashAttnKVPackedFunc: Applied
FlashAttnQKVPackedFunc: Applied
FlashAttnVarlenFunc: Applied
FlashAttnVarlenKVPackedFunc: Applied
FlashAttnVarlenQKVPackedFunc: Applied
