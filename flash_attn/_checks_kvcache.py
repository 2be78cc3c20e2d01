"""The checks of a call with a KV cache; see ``flash_attn.checks`` for what a check is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn import checks
from flash_attn.checks import (
    _bad_shape,
    _like,
    _on_device_of,
    _per_sequence,
    _rank,
    _table,
    _unit_stride,
)


def kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    num_splits: int,
) -> None:
    """q (b, sq, h, d); caches (bc, sc, hk, d) or pages (num_blocks, page_size, hk, d).

    cache_seqlens is as :func:`lengths` makes it.
    """
    layout = checks.CACHE if block_table is None else checks.PAGES
    checks.operands(q, k_cache, v_cache, checks.DENSE_Q, layout, "k_cache", "v_cache")
    batch = q.shape[0]
    if block_table is not None:
        _table(block_table, k_cache, "k_cache", batch, q)
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: got one with block_table; pages need none")
    elif cache_batch_idx is not None:
        _per_sequence(cache_batch_idx, "cache_batch_idx", batch, q)
    elif k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache: got batch {k_cache.shape[0]}; without cache_batch_idx it must be that of q, "
            f"{batch}, and without block_table there are no pages"
        )
    if cache_leftpad is not None:
        _per_sequence(cache_leftpad, "cache_leftpad", batch, q)
    checks.num_splits(num_splits)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    new = _new_keys(q, k, v, k_cache, v_cache, cache_seqlens, capacity)
    _within(cache_seqlens, batch, new, capacity, q)
    _rotary(q, k, rotary_cos, rotary_sin, capacity)


def no_gradient(*named: tuple[str, Tensor | None]) -> None:
    """There is no backward through a cache: it would have to undo the append."""
    if not torch.is_grad_enabled():
        return
    for name, x in named:
        if isinstance(x, Tensor) and x.requires_grad:
            raise RuntimeError(
                f"{name}: requires_grad is set; flash_attn_with_kvcache has no backward, call it "
                "under torch.no_grad()"
            )


def _new_keys(q, k, v, k_cache, v_cache, cache_seqlens, capacity: int) -> int:
    """The number of new keys per sequence."""
    if k is None or v is None:
        if k is not None or v is not None:
            missing = "v" if v is None else "k"
            raise ValueError(f"{missing}: got None; k and v are appended together or not at all")
        return 0
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: got None; with new keys it says where they go")
    layout = "(batch, seqlen_new, heads_k, head_dim)"
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        heads_kv, head_dim = cache.shape[-2:]
        _no_overlap(cache, f"{name}_cache")
        _rank(x, name, layout)
        _like(x, name, q)
        if x.shape[0] != q.shape[0] or x.shape[2] != heads_kv or x.shape[3] != head_dim:
            expected = f"({q.shape[0]}, seqlen_new, {heads_kv}, {head_dim})"
            raise _bad_shape(x, name, expected)
    if k.shape[1] != v.shape[1]:
        raise _bad_shape(v, "v", f"that of k, {tuple(k.shape)},")
    if k.shape[1] > capacity:
        raise ValueError(f"k: got {k.shape[1]} new keys; the cache holds {capacity} per sequence")
    return k.shape[1]


def _no_overlap(cache: Tensor, name: str) -> None:
    """What `expand` makes is one memory for several rows: which of the new ones would it keep?"""
    if any(stride == 0 and size > 1 for size, stride in zip(cache.shape, cache.stride())):
        raise ValueError(
            f"{name}: got shape {tuple(cache.shape)} with strides {cache.stride()}; new keys need "
            "memory of their own in each row (call .contiguous())"
        )


def lengths(cache_seqlens: Any) -> int | Tensor | None:
    """One length for all sequences as an int, whichever integer it is; or a tensor of lengths."""
    if cache_seqlens is None or (isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() > 0):
        return cache_seqlens
    try:
        return checks.integer(cache_seqlens, "cache_seqlens")
    except TypeError:
        raise TypeError(
            f"cache_seqlens: got {cache_seqlens!r}; an integer or a tensor of them is needed"
        ) from None


def _within(cache_seqlens, batch: int, new: int, capacity: int, q: Tensor) -> None:
    if cache_seqlens is None:
        return
    if isinstance(cache_seqlens, Tensor):
        _per_sequence(cache_seqlens, "cache_seqlens", batch, q)
    elif not -1 <= cache_seqlens <= capacity - new:
        raise ValueError(
            f"cache_seqlens: got {cache_seqlens}; with {new} new keys and room for {capacity}, "
            f"accepted are -1 (skip) and 0 to {capacity - new}"
        )


def _rotary(q, k, rotary_cos, rotary_sin, capacity: int) -> None:
    if rotary_cos is None or rotary_sin is None:
        if rotary_cos is not None or rotary_sin is not None:
            missing = "rotary_sin" if rotary_sin is None else "rotary_cos"
            raise ValueError(f"{missing}: got None; rotary_cos and rotary_sin come together")
        return
    if k is None:
        raise ValueError(
            "rotary_cos: got one without new keys k; the keys that are appended get rotated"
        )
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        _rank(x, name, "(seqlen_rotary, rotary_dim / 2)")
        if not x.is_floating_point():
            raise ValueError(f"{name}: got dtype {x.dtype}; a floating dtype is needed")
        _on_device_of(x, name, q)
        _unit_stride(x, name)
    if rotary_sin.shape != rotary_cos.shape:
        expected = f"that of rotary_cos, {tuple(rotary_cos.shape)},"
        raise _bad_shape(rotary_sin, "rotary_sin", expected)
    if not 1 <= rotary_cos.shape[1] * 2 <= q.shape[-1]:
        expected = f"(seqlen_rotary, rotary_dim / 2) with rotary_dim <= {q.shape[-1]}"
        raise _bad_shape(rotary_cos, "rotary_cos", expected)
    if rotary_cos.shape[0] < capacity:
        raise _bad_shape(
            rotary_cos, "rotary_cos", f"a row for each of the {capacity} positions of the cache"
        )
