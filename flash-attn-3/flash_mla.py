"""FlashMLA's two names, served by ``flash_attn_with_kvcache`` of ``flash_attn``.

Where FlashMLA itself is installed in the same folder, its package is found before this module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn import flash_attn_with_kvcache
from flash_attn_3 import _beside  # noqa: F401  raises beside another flash_attn

__all__ = ["SERVED_BY", "flash_mla_with_kvcache", "get_mla_metadata"]

#: Whose kernels run; the benchmarks look.
SERVED_BY: str = "flash_attn"
_METADATA_COLUMNS = 8  # what programs that keep a buffer for it expect


def get_mla_metadata(cache_seqlens: Tensor | None = None, *_: Any, **__: Any) -> tuple:
    """What ``flash_mla_with_kvcache`` takes as tile_scheduler_metadata and num_splits.

    Nothing is prepared before a call here, so both are zeros whatever the arguments are, and no
    call reads them.

    Arguments:
        cache_seqlens: (batch,), int32: for the device and the batch. The others are not read.

    Returns:
        (1, 8) and (batch + 1,), int32, on the device of cache_seqlens.
    """
    like = torch.empty(0, dtype=torch.int32) if cache_seqlens is None else cache_seqlens
    metadata = like.new_zeros((1, _METADATA_COLUMNS), dtype=torch.int32)
    return metadata, like.new_zeros(like.shape[0] + 1, dtype=torch.int32)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    *,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Latent attention of each sequence's queries to its pages. No gradient.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16: first the columns that meet the
            value's, then the rotated ones; head_dim - head_dim_v is at most 64.
        k_cache: (num_blocks, page_size, heads_k, head_dim), any page_size: a key's first head_dim_v
            columns are its value.
        block_table: (batch, max_blocks), int32; -1 is no page.
        cache_seqlens: (batch,), int32: the keys in use.
        head_dim_v: at most 512.
        tile_scheduler_metadata, num_splits: not read.
        softmax_scale: None is ``head_dim ** -0.5``.
        causal: the last query sees all keys, the one before it all but the last, and so on.
        attn_sink: (heads,): a logit of each head that joins the softmax's denominator, or None.
        the others: refused, unless they say that there is none.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), dtype of q; lse (batch, heads, seqlen_q), float32.

    Raises:
        NotImplementedError: codes of 8 bits, and sparse attention.
        TypeError, ValueError: as ``flash_attn.flash_attn_with_kvcache``.
    """
    refused = {
        "is_fp8_kvcache": is_fp8_kvcache or None,
        "indices": indices,
        "descale_q": descale_q,
        "descale_k": descale_k,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    for name, value in refused.items():
        if value is not None:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise NotImplementedError(
                f"{name}: got {got}; a latent cache is in 16 bits here, and all of it is read"
            )
    head_dim = q.shape[-1]
    if not 1 <= head_dim_v <= head_dim or k_cache.shape[-1] != head_dim:
        raise ValueError(
            f"head_dim_v: got {head_dim_v} with a q of {head_dim} and a k_cache of "
            f"{k_cache.shape[-1]} columns; q and k_cache need as many, of which head_dim_v are the "
            "value's"
        )
    return flash_attn_with_kvcache(
        q[..., head_dim_v:],
        k_cache[..., head_dim_v:],
        k_cache[..., :head_dim_v],
        qv=q[..., :head_dim_v],
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        s_aux=attn_sink,
        return_softmax_lse=True,
    )
