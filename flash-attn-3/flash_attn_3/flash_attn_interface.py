"""The functions of FlashAttention-3, on the kernels of ``flash_attn``.

Signatures and meanings are FA3's; what is after a ``*`` is more than it takes, and named as in
``flash_attn``, whose docstrings have shapes and dtypes in full. On a CPU dtypes may also be float32
and float64. docs/fa3.md lists every argument: what is honoured, what is harmless, what is refused.

In every function here:

- ``qv`` is for a cache of latent rows, of which k has at most 64 columns and v at most 512: scores
  are (q·k + qv·v) · softmax_scale, whose default is that of all columns. Dense k and v are taken
  for such a cache; there is no gradient and no dropout;
- ``q_descale``, ``k_descale`` and ``v_descale`` are what codes in float8_e4m3fn are multiplied by:
  a number, or float32 (batch, heads_k), all three. q, k and v may be codes, or a cache's alone
  beside q in 16 bits, which may also have a number of each row and head. Of q in codes the result
  is bfloat16, or has the dtype of ``out``, and there are no gradient, no dropout, no new keys, no
  rotary tables and no left padding. ``fp8_products`` allows more rounding with them, for speed, as
  in ``flash_attn``;
- ``attention_chunk`` c > 0 adds to the mask: the query of row i, at position p = i + seqlen_k -
  seqlen_q, sees keys j with ``j // c == p // c`` alone, counted from the sequence's first key
  (after ``cache_leftpad``); 0 and None are no chunks;
- ``sm_margin`` SMs are left to what runs beside the call by Hopper's kernels of head dims up to 256
  forward and 512 backward, which fill the GPU once. Decode kernels, wider forwards, Ampere's, and
  the passes around a call do not leave any; at least 2 SMs stay;
- ``pack_gqa`` and ``scheduler_metadata`` change nothing: what they choose is chosen inside;
- ``batch_invariant`` makes the result of a row, to the bit, independent of what else is in the
  batch; a cache whose rows are then taken as pages needs head dims of multiples of 8 on CUDA;
- ``num_splits`` changes results by rounding alone: it is taken with packed rows and with a cache,
  and a dense call without a cache chooses by itself;
- ``learnable_sink`` and ``sinks`` are other names of ``s_aux``, ``block_table`` of ``page_table``;
- ``out`` is a buffer for the result, of its shape and dtype, with any strides; it is returned.
"""

from __future__ import annotations

from flash_attn_3 import _beside  # noqa: F401  before what only that flash_attn has

# isort: split
from torch import Tensor

from flash_attn.api import checks, qkv_packed
from flash_attn.call import Descale, Options, Window
from flash_attn_3 import _C, _forward  # noqa: F401  the operators come with the functions
from flash_attn_3._asked import Asked, of_latent_part, one_of
from flash_attn_3._cache import (
    flash_attn_combine,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from flash_attn_3._private import _flash_attn_backward, _flash_attn_forward  # noqa: F401

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

#: Whose kernels these are: the package of this name under names of another has no such attribute.
SERVED_BY: str = "flash_attn"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    window_size: Window = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    batch_invariant: bool = False,
    fp8_products: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn.flash_attn_func``; differentiable in q, k, v and s_aux.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, or codes as k and v.
        k: (batch, seqlen_k, heads_k, head_dim); heads_k divides heads.
        v: (batch, seqlen_k, heads_k, head_dim_v).
        softmax_scale: factor on q kᵀ; None is ``head_dim ** -0.5``.
        causal, window_size: aligned to the bottom-right corner; (-1, -1) is no window.
        softcap: c > 0 replaces each scaled score s by ``c · tanh(s / c)``.
        deterministic: the same gradients bit for bit on every run.
        return_attn_probs: also return the log-sum-exp, as FA3 does, and no probabilities.
        dropout_p, alibi_slopes, s_aux: as in ``flash_attn``.
        the others: see the module.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), dtype of q. With return_attn_probs
        ``(out, lse)``: lse (batch, heads, seqlen_q), float32, differentiable.

    Raises:
        TypeError, ValueError: an argument that is not as above; the message names it.
        NotImplementedError: see the module; CUDA tensors for which there is no compiled kernel.
    """
    options = Options(
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, deterministic=deterministic,
        batch_invariant=batch_invariant,
        s_aux=one_of(s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks),
    )  # fmt: skip
    left, right = checks.window(window_size)
    asked = Asked(
        q, k, v, qv=qv, out=out, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=softmax_scale, causal=causal, window_size_left=left,
        window_size_right=right, attention_chunk=attention_chunk, softcap=softcap,
        num_splits=num_splits, sm_margin=sm_margin, fp8_products=fp8_products,
    )  # fmt: skip
    result = _forward.forward(asked, options)
    return result if return_attn_probs else result[0]


def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    window_size: Window = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    page_table: Tensor | None = None,
    block_table: Tensor | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    batch_invariant: bool = False,
    fp8_products: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    only_qv: bool | None = False,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn_func` for sequences one after the other; differentiable as that.

    Arguments:
        q: (total_q, heads, head_dim).
        k, v: (total_k, heads_k, head_dim); with page_table, pages (num_pages, page_size, heads_k,
            head_dim), of which there is no backward. On CUDA head dims are multiples of 8.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,), int32: where each sequence starts, and where the
            last one ends. cu_seqlens_k may be None where seqused_k says how long sequences are
            and page_table where they lie.
        max_seqlen_q, max_seqlen_k: the longest sequence, or more.
        seqused_q: (batch,), int32: how many rows of each sequence of q are in use, from its first
            on; None is all. Masks are aligned to the last one in use. Of the others the output is
            0, the log-sum-exp -inf (that of a sink, where there is one), every gradient 0.
        seqused_k: the same for k and v; what the other rows hold is not read.
        page_table: (batch, pages), int32: the pages of each sequence.
        only_qv: scores are those of qv alone, without the rotated part. q and k are not read, and
            may be None.
        return_softmax_lse: another name of return_attn_probs.
        the others: as there.

    Returns:
        out (total_q, heads, head_dim_v), dtype of q. With return_attn_probs ``(out, lse)``: lse
        (heads, total_q), float32, differentiable.

    Raises:
        as :func:`flash_attn_func`; NotImplementedError: a backward through page_table.
    """
    options = Options(
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, deterministic=deterministic,
        batch_invariant=batch_invariant,
        s_aux=one_of(s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks),
    )  # fmt: skip
    left, right = checks.window(window_size)
    asked = Asked(
        q, k, v, None, None, qv, out, cu_seqlens_q, cu_seqlens_k, None, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, one_of(page_table=page_table, block_table=block_table),
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        softmax_scale=softmax_scale, causal=causal, window_size_left=left,
        window_size_right=right, attention_chunk=attention_chunk, softcap=softcap,
        num_splits=num_splits, sm_margin=sm_margin, fp8_products=fp8_products,
    )  # fmt: skip
    asked = of_latent_part(asked, only_qv)
    table = "page_table" if block_table is None else "block_table"
    result = _forward.forward(asked, options, table=table)
    return result if return_attn_probs or return_softmax_lse else result[0]


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    window_size: Window = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    batch_invariant: bool = False,
    fp8_products: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn_func` for queries, keys and values in one tensor.

    Arguments:
        qkv: (batch, seqlen, 3, heads, head_dim); or, with num_heads_q, (batch, seqlen,
            num_heads_q + 2 · heads_k, head_dim): the heads of q, then those of k, then those of v.
        num_heads_q: how many of the heads are those of q.
        the others: as there.

    Returns, raises: as there.
    """
    if num_heads_q is None or qkv.dim() == 5:
        q, k, v = qkv_packed.checked(qkv, "qkv", rank=5)
    else:
        q, k, v = _split(qkv, checks.integer(num_heads_q, "num_heads_q"))
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
        batch_invariant=batch_invariant, fp8_products=fp8_products, s_aux=s_aux,
        learnable_sink=learnable_sink, sinks=sinks, out=out,
    )  # fmt: skip


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    checks.tensor(qkv, "qkv")
    others = qkv.shape[-2] - heads if qkv.dim() == 4 else 0
    if others < 2 or others % 2 or heads < 1:
        raise ValueError(
            f"qkv: got shape {tuple(qkv.shape)}; with num_heads_q={heads} (batch, seqlen, {heads} "
            "+ 2 · heads_k, head_dim) is needed"
        )
    return qkv.split([heads, others // 2, others // 2], -2)
