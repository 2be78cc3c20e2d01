"""The public functions: signatures, defaults, documentation. What they do: ``dispatch/calls.py``.

Names with a leading underscore are those that existing clients import from here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

import flash_attn_2_cuda as flash_attn_gpu  # noqa: F401
from flash_attn.api import qkv_packed
from flash_attn.api.checks_fp8 import given_of
from flash_attn.call import Cache, Descale, Lengths, MaxLogits, Options, Window
from flash_attn.compat import keywords
from flash_attn.compat.functions import Applied, function_class
from flash_attn.compat.names import refusing
from flash_attn.compat.tensors import maybe_contiguous, round_multiple  # noqa: F401
from flash_attn.dispatch import calls, ops
from flash_attn.dispatch.private import (  # noqa: F401
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

#: What clients ask for on another maker's GPUs.
USE_TRITON_ROCM: bool = False

_wrapped_flash_attn_forward: Callable[..., Any] = ops.forward
_wrapped_flash_attn_backward: Callable[..., Any] = ops.backward
_wrapped_flash_attn_varlen_forward: Callable[..., Any] = ops.varlen_forward
_wrapped_flash_attn_varlen_backward: Callable[..., Any] = ops.varlen_backward


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_max_logits: MaxLogits = False,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    out_dtype: torch.dtype | None = None,
    fp8_products: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Attention ``softmax(q kᵀ · softmax_scale + mask) v`` without ever forming the scores.

    Memory grows with ``seqlen``, not with ``seqlen_q · seqlen_k`` (Dao et al. 2022,
    arXiv:2205.14135; Dao 2023, arXiv:2307.08691); on CUDA docs/arguments.md says what the backward
    takes. Differentiable in q, k, v and s_aux, but for codes.

    With fewer heads in k and v than in q, query head ``i`` reads head ``i // (heads / heads_k)``
    (grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245). ``causal`` aligns the mask
    to the bottom-right corner: query i sees the keys ``j <= i + seqlen_k - seqlen_q``. With
    seqlen_q = 2, seqlen_k = 5 and the other way round (1 is seen, 0 is masked)::

        1 1 1 1 0          0 0
        1 1 1 1 1          0 0
                           0 0
                           1 0
                           1 1

    A row that sees no key has output 0, log-sum-exp -inf and gradients 0.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16; on the CPU also float32 and
            float64; or codes in float8_e4m3fn, and k and v as well. Any strides with a unit last
            one; head_dim 1 to 512. On CUDA rows start at multiples of 16 bytes, and a head_dim that
            is no multiple of 8 costs a padded copy (of codes, 16, and other rows a copy).
        k: (batch, seqlen_k, heads_k, head_dim), dtype and device of q; heads_k divides heads.
        v: (batch, seqlen_k, heads_k, head_dim), as k; its head_dim may differ, and is that of out.
        dropout_p: probability of dropping a weight, 0 to 1 - 2**-16, rounded to a multiple of
            2**-16; the rest is scaled by 1 / (1 - dropout_p). By torch's generator of q's device.
        softmax_scale: factor on q kᵀ, finite; None is ``head_dim ** -0.5``.
        causal: mask the keys after the query, as drawn above.
        window_size: (left, right), in keys: query i sees the keys from
            ``i + seqlen_k - seqlen_q - left`` to ``i + seqlen_k - seqlen_q + right``; a negative
            side is unbounded; ``causal`` makes right 0 (Beltagy et al. 2020, arXiv:2004.05150).
            Any two integers: a tuple, a list, an array, a tensor; one on a GPU is waited for.
        softcap: c > 0 replaces each scaled score s by ``c · tanh(s / c)`` before any mask
            (Gemma 2, arXiv:2408.00118); 0 is off.
        alibi_slopes: (heads,) or (batch, heads), float32: adds
            ``-slope · |i + seqlen_k - seqlen_q - j|`` (Press et al. 2022, arXiv:2108.12409).
        deterministic: the same gradients bit for bit on every run; slower on the GPU.
        return_attn_probs: also return log-sum-exp and probabilities: for tests, the whole matrix.
        s_aux: (heads,), any floating dtype: a logit per head that joins the softmax denominator
            and has no value vector (attention sinks, Xiao et al. 2023, arXiv:2309.17453). -inf is
            none; +inf takes all weight: out 0, log-sum-exp +inf, all gradients 0.
        batch_invariant: a row's result does not depend on what else is in the batch.
        return_lse, return_softmax_lse: also return the log-sum-exp; it is differentiable.
        return_max_logits: also return the largest logit of each head, for QK-clip (Kimi K2,
            arXiv:2507.20534); "row": of each row. Sinks do not count. Not with return_attn_probs.
        q_descale, k_descale, v_descale: of codes: a number is ``code · descale``. A number > 0, or
            float32 (batch, heads_k) of any strides, that of q too. None is 1.
        out_dtype: of codes: that of out, bfloat16 (None is this) or float16.
        fp8_products: of codes: permits Hopper GPUs to multiply codes as they are, which is faster,
            and rounds probabilities to codes: out is off by about 2% of its norm on random inputs,
            as much as v in codes is, and the log-sum-exp by 1e-3 where scores are moderate, else by
            2**-10 of the largest one. CPUs, other GPUs, and calls without such a kernel ignore it.

    Returns:
        out (batch, seqlen_q, heads, head_dim), dtype of q or out_dtype; contiguous, but for a
        head_dim that is no multiple of 8 (of codes, 16) on CUDA: a slice of the padded result.
        With return_lse, ``(out, lse)``: lse (batch, heads, seqlen_q), float32 (float64 for float64
        inputs), natural logarithm of the softmax denominator, sinks included.
        With return_attn_probs, ``(out, lse, S_dmask)``: S_dmask (batch, heads, seqlen_q,
        seqlen_k), the probabilities, with a negative sign where dropped. With return_max_logits,
        one tensor more at the end, (heads,), or for "row" like lse, without gradient: the largest
        score as it enters the softmax; -inf where no key is seen.

    Raises:
        TypeError, ValueError: an argument that is not as above; the message names it.
        RuntimeError: alibi_slopes, or codes, that require a gradient; a second derivative.
        NotImplementedError: CUDA tensors for which there is no compiled kernel; codes with dropout,
            return_attn_probs or return_max_logits.
    """
    if unknown:
        raise keywords.unexpected(flash_attn_func, unknown)
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                      deterministic, return_attn_probs, s_aux, batch_invariant, return_lse,
                      return_softmax_lse, return_max_logits)  # fmt: skip
    given = given_of(q_descale, k_descale, v_descale, out_dtype, fp8_products)
    return calls.attend(q, k, v, options, given=given)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_max_logits: MaxLogits = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_func` for keys and values in one tensor.

    Faster than passing its slices: the gradient of kv is written in place, not concatenated.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim), as in :func:`flash_attn_func`.
        kv: (batch, seqlen_k, 2, heads_k, head_dim): keys, then values.

    The others, what is returned and what is raised are those of :func:`flash_attn_func`.
    """
    if unknown:
        raise keywords.unexpected(flash_attn_kvpacked_func, unknown)
    k, v = qkv_packed.checked(kv, "kv", rank=5)
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                      deterministic, return_attn_probs, s_aux, batch_invariant, return_lse,
                      return_softmax_lse, return_max_logits)  # fmt: skip
    return calls.attend(q, k, v, options, None, None, kv)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_max_logits: MaxLogits = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_func` for queries, keys and values in one tensor.

    Faster than passing its slices: the gradient of qkv is written in place, not concatenated.
    For fewer key heads than query heads use :func:`flash_attn_kvpacked_func`.

    Arguments:
        qkv: (batch, seqlen, 3, heads, head_dim): queries, keys, values.

    The others, what is returned and what is raised are those of :func:`flash_attn_func`.
    """
    if unknown:
        raise keywords.unexpected(flash_attn_qkvpacked_func, unknown)
    q, k, v = qkv_packed.checked(qkv, "qkv", rank=5)
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                      deterministic, return_attn_probs, s_aux, batch_invariant, return_lse,
                      return_softmax_lse, return_max_logits)  # fmt: skip
    return calls.attend(q, k, v, options, None, None, qkv)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_max_logits: MaxLogits = False,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    out_dtype: torch.dtype | None = None,
    fp8_products: bool = False,
    qv: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_func` for sequences of different lengths, one after the other, no padding.

    Sequence ``b`` has the query rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``, and likewise
    its keys; each query sees the keys of its own sequence, and masks are aligned per sequence.
    Empty sequences are fine. Rows before the first and past the last one are not read; outputs
    and gradients there are 0. ``flash_attn.bert_padding`` makes such batches from padded ones.

    Arguments:
        q: (total_q, heads, head_dim), as in :func:`flash_attn_func`.
        k, v: (total_k, heads_k, head_dim), dtype and device of q; heads_k divides heads. With
            block_table, pages (num_blocks, page_size, heads_k, head_dim).
        cu_seqlens_q: (batch + 1,), int32, on q's device: where each sequence of q starts, and
            where the last one ends; never decreasing, from 0 or later. Contents are checked on
            the CPU, and with FLASH_ATTN_CHECK=1 on a GPU.
        cu_seqlens_k: (batch + 1,), int32: the same for k and v. With block_table its differences
            are the numbers of keys.
        max_seqlen_q: the longest sequence of q, or more, as an int. A 0-d tensor works too; one
            on the GPU is waited for with return_attn_probs alone, else total_q stands in for it.
        max_seqlen_k: the longest sequence of k.
        block_table: (batch, max_blocks), int32: the pages of each sequence (Kwon et al. 2023,
            arXiv:2309.06180), any page_size. There is no backward with it.
        dropout_p, softmax_scale, softcap, deterministic, s_aux, batch_invariant, return_max_logits:
            as in :func:`flash_attn_func`.
        causal, window_size: as there; ``seqlen_q`` and ``seqlen_k`` are those of the sequence.
        alibi_slopes: (heads,) or (batch, heads), float32.
        q_descale, k_descale, v_descale, out_dtype, fp8_products: of codes as in flash_attn_func; of
            pages alone, as in flash_attn_with_kvcache, and the last permits to round q to codes.
        qv: (total_q, heads, head_dim_v), with block_table: as in :func:`flash_attn_with_kvcache`.

    Returns:
        out (total_q, heads, head_dim), dtype and strides as in :func:`flash_attn_func`.
        With return_lse or return_softmax_lse, ``(out, lse)``: lse (heads, total_q), float32
        (float64 for float64 inputs), differentiable.
        With return_attn_probs, ``(out, lse, S_dmask)``: (batch, heads, max_seqlen_q, max_seqlen_k).

    Raises:
        TypeError, ValueError: an argument that is not as above; the message names it.
        RuntimeError: as in :func:`flash_attn_func`.
        NotImplementedError: CUDA tensors without a compiled kernel; a backward through block_table.
    """
    if unknown:
        raise keywords.unexpected(flash_attn_varlen_func, unknown)
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                      deterministic, return_attn_probs, s_aux, batch_invariant, return_lse,
                      return_softmax_lse, return_max_logits)  # fmt: skip
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    given = given_of(q_descale, k_descale, v_descale, out_dtype, fp8_products)
    return calls.attend(q, k, v, options, lengths, block_table, None, given, qv)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_max_logits: MaxLogits = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_varlen_func` for keys and values in one tensor.

    Faster than passing its slices: the gradient of kv is written in place, not concatenated.

    Arguments:
        q: (total_q, heads, head_dim), as in :func:`flash_attn_varlen_func`.
        kv: (total_k, 2, heads_k, head_dim): keys, then values.

    The others, results and errors are those of :func:`flash_attn_varlen_func`.
    """
    if unknown:
        raise keywords.unexpected(flash_attn_varlen_kvpacked_func, unknown)
    k, v = qkv_packed.checked(kv, "kv", rank=4)
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                      deterministic, return_attn_probs, s_aux, batch_invariant, return_lse,
                      return_softmax_lse, return_max_logits)  # fmt: skip
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return calls.attend(q, k, v, options, lengths, None, kv)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_max_logits: MaxLogits = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_varlen_func` for queries, keys and values in one tensor.

    Faster than passing its slices: the gradient of qkv is written in place, not concatenated.

    Arguments:
        qkv: (total, 3, heads, head_dim): queries, keys, values.
        cu_seqlens: (batch + 1,), int32: where each sequence starts, and where the last one ends.
        max_seqlen: the longest sequence, an int or a 0-d tensor.

    The others, results and errors are those of :func:`flash_attn_varlen_func`.
    """
    if unknown:
        raise keywords.unexpected(flash_attn_varlen_qkvpacked_func, unknown)
    q, k, v = qkv_packed.checked(qkv, "qkv", rank=4)
    options = Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                      deterministic, return_attn_probs, s_aux, batch_invariant, return_lse,
                      return_softmax_lse, return_max_logits)  # fmt: skip
    lengths = Lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return calls.attend(q, k, v, options, lengths, None, qkv)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    return_lse: bool = False,
    k_descale: Descale = None,
    v_descale: Descale = None,
    qv: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """One step of generation: append new keys and values to a cache, rotate, attend. No gradient.

    With k and v, the caches are **modified in place**: the new rows go to positions
    ``cache_seqlens`` onwards, and q attends to the cache with them; the caller advances
    ``cache_seqlens``. With rotary_cos and rotary_sin (Su et al. 2021, arXiv:2104.09864) the new
    keys are rotated at the positions they are stored at; q likewise if the call is causal or
    windowed, else all of q at position ``cache_seqlens``.

    Masks are aligned to the bottom-right corner, as drawn in :func:`flash_attn_func`, with
    seqlen_k the number of keys in use after the append.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim), as in :func:`flash_attn_func`.
        k_cache: (batch_cache, seqlen_cache, heads_k, head_dim), device of q, its dtype or codes in
            float8_e4m3fn; with block_table, pages (num_blocks, page_size, heads_k, head_dim). A
            head_dim that is no multiple of 8 is read slowly, and copied for chunks of many queries;
            codes are always read in place, fastest by rows of multiples of 16 bytes.
        v_cache: as k_cache.
        k, v: (batch, seqlen_new, heads_k, head_dim) to append, or None; need cache_seqlens.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2), or None: per position, with a row
            for each of the cache. rotary_dim <= head_dim; the other columns stay as they are. Any
            floating dtype; the call casts another one than q's. Need k.
        cache_seqlens: the number of keys in use before the append: an int, or (batch,) int32. None
            is the whole cache. -1 leaves a row out: nothing is read or written and out is 0.
        cache_batch_idx: (batch,), int32: the row of the cache of each row of q; None is the
            identity. Not with block_table. With k they must differ, but for rows that are left out.
        cache_leftpad: (batch,), int32: the position of the first key, at most how many there are,
            new ones included; None is 0.
        block_table: (batch, max_blocks), int32: as in :func:`flash_attn_varlen_func`; -1 is no
            page. A page that gets new keys belongs to one sequence.
        softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux: as in
            :func:`flash_attn_func`.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), … (GPT-J); else (i, i + rotary_dim / 2).
        num_splits: parts of the keys that a GPU works on at once; 0 chooses. Rounding may differ.
        return_softmax_lse, return_lse: also return the log-sum-exp.
        k_descale, v_descale: of codes: a key is ``code · k_descale``. A number > 0, or float32 of
            any strides: (batch, heads_k), or of each row and head of the cache, k_cache.shape[:-1].
            None is 1. A new key x is stored as x / k_descale in float32, rounded to the nearest
            code, to even, at most ±448; where rows have numbers, by those of the rows it goes to.
        qv: (batch, seqlen_q, heads, head_dim_v), of latent caches (MLA, arXiv:2405.04434): scores
            are ``(q·k + qv·v) · softmax_scale``, by default that of all columns. Then head_dim is
            at most 64 (0: nothing rotated), head_dim_v 512; both caches may be views of one tensor.

    Returns:
        out (batch, seqlen_q, heads, head_dim), dtype of q. With return_softmax_lse,
        ``(out, lse)``: lse (batch, heads, seqlen_q), float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: an argument that is not as above; the message names it. What tensors
            contain is checked on the CPU, and with FLASH_ATTN_CHECK=1 on a GPU.
        RuntimeError: new keys for a cache that requires a gradient, while gradients are enabled.
            Of other tensors that require one a warning says, once, that they get none.
        NotImplementedError: CUDA tensors for which there is no compiled kernel.
    """
    if unknown:
        raise keywords.unexpected(flash_attn_with_kvcache, unknown)
    cache = Cache(k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
                  cache_leftpad, block_table)  # fmt: skip
    options = Options(softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                      softcap=softcap, alibi_slopes=alibi_slopes, s_aux=s_aux,
                      return_lse=return_lse, return_softmax_lse=return_softmax_lse)  # fmt: skip
    descales = k_descale, v_descale
    return calls.kvcache(q, cache, options, rotary_interleaved, num_splits, *descales, qv)


_of = partial(function_class, module=__name__, takes_grad_mode=True)
FlashAttnFunc: Applied = _of("FlashAttnFunc", flash_attn_func)
FlashAttnKVPackedFunc: Applied = _of("FlashAttnKVPackedFunc", flash_attn_kvpacked_func)
FlashAttnQKVPackedFunc: Applied = _of("FlashAttnQKVPackedFunc", flash_attn_qkvpacked_func)
FlashAttnVarlenFunc: Applied = _of("FlashAttnVarlenFunc", flash_attn_varlen_func)
FlashAttnVarlenKVPackedFunc: Applied = _of(
    "FlashAttnVarlenKVPackedFunc", flash_attn_varlen_kvpacked_func
)
FlashAttnVarlenQKVPackedFunc: Applied = _of(
    "FlashAttnVarlenQKVPackedFunc", flash_attn_varlen_qkvpacked_func
)

__getattr__ = refusing(__name__)
