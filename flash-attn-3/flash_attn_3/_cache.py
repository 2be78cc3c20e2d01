"""``flash_attn_with_kvcache``, and what FlashAttention-3 has around it."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.api import checks
from flash_attn.call import Descale, Options, Window
from flash_attn_3 import _combine, _forward
from flash_attn_3._asked import Asked, of_latent_part, one_of


def flash_attn_with_kvcache(
    q: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    batch_invariant: bool = False,
    fp8_products: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    only_qv: bool | None = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn.flash_attn_with_kvcache``, also for packed rows. No gradient.

    With k and v, the caches are **modified in place**: new rows go to positions ``cache_seqlens``
    onwards, and q attends to the cache with them.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim); with cu_seqlens_q, (total_q, heads, head_dim).
        k_cache, v_cache: (batch_cache, seqlen_cache, heads_k, head_dim); with page_table, pages
            (num_pages, page_size, heads_k, head_dim). In q's dtype, or codes in float8_e4m3fn; if
            q is codes, they are too.
        k, v: (batch, seqlen_new, heads_k, head_dim) to append, or None; with cu_seqlens_k_new,
            (total_new, heads_k, head_dim).
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2), a row for each position.
        cache_seqlens: the number of keys in use before the append, an int or (batch,) int32; None
            is the whole cache, -1 leaves a row out.
        cache_batch_idx, cache_leftpad: (batch,), int32.
        page_table: (batch, pages), int32; -1 is no page.
        cu_seqlens_q: (batch + 1,), int32: q is packed.
        cu_seqlens_k_new: (batch + 1,), int32: k and v are packed. Without k nothing reads it.
        max_seqlen_q: the longest sequence of packed q, or more; None is total_q.
        rotary_seqlens: (batch,), int32: the rotary position of the first new row of each sequence;
            None is cache_seqlens.
        q_descale, k_descale, v_descale, fp8_products: of codes; as the module says.
        only_qv: scores are those of qv alone, without the rotated part. q and k_cache are not read
            and may be None, and there are no new keys.
        num_splits: how many parts of the keys are worked on at once; 0 chooses.
        batch_invariant: as the module says; the rows of a cache are then taken as pages.
        the others: as in ``flash_attn_func`` and ``flash_attn.flash_attn_with_kvcache``.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v), dtype of q. With
        return_softmax_lse ``(out, lse)``: lse (batch, heads, seqlen_q), or (heads, total_q),
        float32. (Two, which ``out, lse, *rest`` takes as well.)

    Raises:
        TypeError, ValueError, RuntimeError: as ``flash_attn.flash_attn_with_kvcache``.
        NotImplementedError: see the module; CUDA tensors for which there is no compiled kernel.
    """
    options = Options(
        alibi_slopes=alibi_slopes,
        batch_invariant=checks.flag(batch_invariant, "batch_invariant"),
        s_aux=one_of(s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks),
    )
    left, right = checks.window(window_size)
    asked = Asked(
        q, k_cache, v_cache, k, v, qv, out, cu_seqlens_q, None, cu_seqlens_k_new, None,
        cache_seqlens, max_seqlen_q, None,
        one_of(page_table=page_table, block_table=block_table), cache_batch_idx, cache_leftpad,
        rotary_cos, rotary_sin, rotary_seqlens, q_descale, k_descale, v_descale, softmax_scale,
        causal, left, right, attention_chunk, softcap, rotary_interleaved, num_splits=num_splits,
        sm_margin=sm_margin, fp8_products=fp8_products,
    )  # fmt: skip
    asked = of_latent_part(asked, only_qv, "v_cache")
    table = "page_table" if block_table is None else "block_table"
    result = _forward.forward(asked, options, is_cache=True, table=table)
    return result if return_softmax_lse else result[0]


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Results over disjoint keys as one.

    Arguments:
        out_partial: (splits, batch, seqlen, heads, head_dim) or (splits, total, heads, head_dim),
            any floating dtype. What a part holds whose lse is -inf does not count.
        lse_partial: the same without head_dim, natural logarithms.
        out: a buffer for the result, or None.
        out_dtype: that of the result; None is that of out_partial.

    Returns:
        out, as out_partial without splits; lse, as lse_partial without splits, float32 or, if a
        part is float64, that.

    Raises:
        ValueError: shapes and dtypes that are not as above.
    """
    return _combine.combine(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """What ``scheduler_metadata`` takes: (1,), int32, on the device of cache_seqlens.

    Nothing is prepared before a call here, so it is 0 whatever the arguments are, and no call
    reads it.
    """
    return _combine.metadata(cache_seqlens)
