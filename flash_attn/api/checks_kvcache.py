"""The checks of a call with a KV cache; see ``checks.py`` for what a check is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn.api import checks
from flash_attn.api.warn import warn_once
from flash_attn.call import FP8, Cache, Options

_NEW_KEYS = checks.Layout("(batch, seqlen_new, heads_k, head_dim)", 4)
_ROTARY_TABLE = checks.Layout("(seqlen_rotary, rotary_dim / 2)", 2)


def kvcache(
    q: Tensor, cache: Cache, look: bool = True, take: Callable[..., None] = checks.operands
) -> Cache:
    """q (b, sq, h, d). Returns the cache, its cache_seqlens an int if that is any other integer.

    look: at what the library would look at as well. take: the check of q and the two caches.
    """
    lengths, block_table = _lengths(cache.cache_seqlens), cache.block_table
    if lengths is not cache.cache_seqlens:
        cache = cache._replace(cache_seqlens=lengths)
    if look:
        _tensors(q, cache, take)
    capacity = cache.k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    new = 0
    if cache.k is not None or cache.v is not None:
        new = _new_keys(q, cache, capacity, look)
    if not (lengths is None or isinstance(lengths, Tensor)):
        _within(lengths, new, capacity)
    if cache.rotary_cos is not None or cache.rotary_sin is not None:
        _rotary(q, cache, capacity, look)
    return cache


def _tensors(q: Tensor, cache: Cache, take: Callable[..., None]) -> None:
    k_cache, block_table, batch_idx = cache.k_cache, cache.block_table, cache.cache_batch_idx
    layout = checks.CACHE if block_table is None else checks.PAGES
    take(q, k_cache, cache.v_cache, checks.DENSE_Q, layout, "k_cache", "v_cache")
    batch = q.shape[0]
    if block_table is not None:
        checks.page_table(block_table, k_cache, "k_cache", batch, q)
        if batch_idx is not None:
            raise ValueError("cache_batch_idx: got one with block_table; pages need none")
    elif batch_idx is not None:
        checks.per_sequence(batch_idx, "cache_batch_idx", batch, q)
    elif k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache: got batch {k_cache.shape[0]}; without cache_batch_idx it must be that of q, "
            f"{batch}, and without block_table there are no pages"
        )
    if cache.cache_leftpad is not None:
        checks.per_sequence(cache.cache_leftpad, "cache_leftpad", batch, q)
    if isinstance(cache.cache_seqlens, Tensor):
        checks.per_sequence(cache.cache_seqlens, "cache_seqlens", batch, q)


def without_gradient(
    q: Tensor, qv: Tensor | None, cache: Cache, options: Options
) -> tuple[Tensor, Tensor | None, Cache, Options]:
    """The call as under ``torch.no_grad()``: there is no backward through a cache, which would
    have to undo the append.

    A cache that requires a gradient itself is not written: autograd would not know.
    """
    if not (torch.is_grad_enabled() and _any_requires_grad(q, qv, *cache[:6], options.s_aux)):
        return q, qv, cache, options
    for name, x in (("k_cache", cache.k_cache), ("v_cache", cache.v_cache)):
        if cache.k is not None and x.requires_grad:
            raise RuntimeError(
                f"{name}: requires_grad is set; new keys are written into it, of which autograd "
                "keeps no record: call flash_attn_with_kvcache under torch.no_grad()"
            )
    say_there_is_no_gradient()
    cache, s_aux = Cache(*map(_detached, cache)), _detached(options.s_aux)
    return _detached(q), _detached(qv), cache, options._replace(s_aux=s_aux)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


def say_there_is_no_gradient() -> None:
    if not torch.compiler.is_compiling():
        warn_once(
            "attention over a KV cache has no backward: a tensor of this call requires a gradient "
            "and gets none; call it under torch.no_grad()"
        )


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    if torch.compiler.is_compiling():
        return any(x is not None and x.requires_grad for x in tensors)
    return torch._C._any_requires_grad(*tensors)


def _new_keys(q: Tensor, cache: Cache, capacity: int, look: bool) -> int:
    """The number of new keys per sequence."""
    k, v = cache.k, cache.v
    if k is None or v is None:
        name, given, missing = ("k", k, "v") if v is None else ("v", v, "k")
        if not isinstance(given, Tensor):
            raise TypeError(
                f"{name}: got {given!r}; a torch.Tensor of new keys and values is needed; k, v, "
                "rotary_cos and seven more come before causal: pass options by keyword"
            )
        raise ValueError(f"{missing}: got None; k and v are appended together or not at all")
    if cache.cache_seqlens is None:
        raise ValueError("cache_seqlens: got None; with new keys it says where they go")
    _no_overlap(cache.k_cache, "k")
    _no_overlap(cache.v_cache, "v")
    if cache.k_cache is cache.v_cache:
        _one_memory(cache)
    if look:
        _new_tensors(q, cache)
    new = k.shape[1]
    if new > capacity:
        raise ValueError(f"k: got {new} new keys; the cache holds {capacity} per sequence")
    return new


def _new_tensors(q: Tensor, cache: Cache) -> None:
    k, v = cache.k, cache.v
    batch, traced = q.shape[0], torch.compiler.is_compiling()
    for name, x, old in (("k", k, cache.k_cache), ("v", v, cache.v_cache)):
        checks.laid_out(x, name, _NEW_KEYS)
        checks.like_q(x, name, q, traced)
        shape, head = x.shape, old.shape[2:]
        if shape[0] != batch or shape[2:] != head:
            raise checks.bad_shape(x, name, f"({batch}, seqlen_new, {head[0]}, {head[1]})")
    if not traced and _same_memory(cache.k_cache, cache.v_cache):
        _one_memory(cache)
    if k.shape[1] != v.shape[1]:
        raise checks.bad_shape(v, "v", f"that of k, {tuple(k.shape)},")


def _no_overlap(cache: Tensor, name: str) -> None:
    """`expand` makes one memory for several rows, which could keep only one of the new ones."""
    strides = cache.stride()
    if 0 in strides and any(n > 1 and not stride for n, stride in zip(cache.shape, strides)):
        raise ValueError(
            f"{name}_cache: got shape {tuple(cache.shape)} with strides {strides}; new keys need "
            "memory of their own in each row (call .contiguous())"
        )


def _one_memory(cache: Cache) -> None:
    """Values would overwrite keys, unless k and v are one tensor too, without rotary and codes."""
    changed = cache.rotary_cos is not None or cache.k_cache.dtype is FP8
    if changed or not _same_memory(cache.k, cache.v):
        raise ValueError(
            "v_cache: got the memory of k_cache; new keys and new values need memory of their own"
        )


def _same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors start at one address; False for tensors without memory."""
    if x is y or type(x) not in checks.PLAIN:
        return x is y
    try:
        return x.data_ptr() == y.data_ptr() != 0
    except RuntimeError:  # wrapped by a transform of torch.func
        return False


def _lengths(cache_seqlens: Any) -> int | Tensor | None:
    """One length for all sequences as an int, whichever integer it is; or a tensor of lengths."""
    if cache_seqlens is None or (isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() > 0):
        return cache_seqlens
    try:
        return checks.integer(cache_seqlens, "cache_seqlens")
    except TypeError:
        raise TypeError(
            f"cache_seqlens: got {cache_seqlens!r}; an integer or a tensor of them is needed"
        ) from None


def _within(cache_seqlens: int, new: int, capacity: int) -> None:
    if not -1 <= cache_seqlens <= capacity - new:
        raise ValueError(
            f"cache_seqlens: got {cache_seqlens}; with {new} new keys and room for {capacity}, "
            f"accepted are -1 (skip) and 0 to {capacity - new}"
        )


def _rotary(q: Tensor, cache: Cache, capacity: int, look: bool) -> None:
    cos, sin = cache.rotary_cos, cache.rotary_sin
    if cos is None or sin is None:
        missing = "rotary_sin" if sin is None else "rotary_cos"
        raise ValueError(f"{missing}: got None; rotary_cos and rotary_sin come together")
    if cache.k is None:
        raise ValueError(
            "rotary_cos: got a table without k; rotary turns the new keys and q with them, so k "
            "and v are needed"
        )
    _floating(cos, "rotary_cos")
    _floating(sin, "rotary_sin")
    if look:
        _tables(q, cos, sin)
    if cos.shape[0] < capacity:
        raise checks.bad_shape(
            cos, "rotary_cos", f"a row for each of the {capacity} positions of the cache"
        )


def _floating(x: Tensor, name: str) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        checks.laid_out(x, name, _ROTARY_TABLE)
        raise ValueError(f"{name}: got dtype {x.dtype}; a floating dtype is needed")


def _tables(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        checks.laid_out(x, name, _ROTARY_TABLE)
        checks.on_device_of(x, name, q)
        checks.unit_stride(x, name)
    if sin.shape != cos.shape:
        raise checks.bad_shape(sin, "rotary_sin", f"that of rotary_cos, {tuple(cos.shape)},")
    if not 1 <= cos.shape[1] * 2 <= q.shape[-1]:
        expected = f"(seqlen_rotary, rotary_dim / 2) with rotary_dim <= {q.shape[-1]}"
        raise checks.bad_shape(cos, "rotary_cos", expected)
