"""``flash_attn.explain_call(...)``: ``explain`` with the arguments of the call itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flash_attn.api import checks, checks_kvcache, checks_latent
from flash_attn.call import Cache, pick

from .describe import explain
from .explanation import Explanation


def explain_call(
    function: Callable[..., Any],
    *args: Any,
    backward: bool = False,
    gpu: str | None = None,
    **kwargs: Any,
) -> Explanation:
    """:func:`explain` of ``function(*args, **kwargs)``, any of the seven public functions, also
    with arguments bound to it by ``functools.partial``.

    Packed tensors, appended keys and rotary tables are given as to the function itself; backward
    and gpu are those of :func:`explain`.

    Raises:
        TypeError, ValueError: arguments that the function has not; of an append, whatever does not
            fit; else as :func:`explain`.
    """
    if isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    call = inspect.signature(function).bind(*args, **kwargs).arguments
    if "unknown" in call:
        function(*args, **kwargs)  # says which was meant, and computes nothing
    if "k_cache" in call:
        call = _as_cache(**call)
    for name, count in (("qkv", 3), ("kv", 2)):
        if name in call:
            packed = call.pop(name)
            checks.qkv_packed(packed, name, count, rank=4 if "varlen" in function.__name__ else 5)
            call.update(zip("qkv"[-count:], packed.unbind(-3)))
    if "cu_seqlens" in call:
        ends, longest = call.pop("cu_seqlens"), call.pop("max_seqlen")
        call |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        call |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return explain(**call, backward=backward, gpu=gpu)


def _as_cache(q: Tensor, num_splits: Any = 0, rotary_interleaved: bool = True, **others):
    """The arguments of ``explain`` for those of ``flash_attn_with_kvcache``."""
    take = checks.operands if others.get("qv") is None else checks_latent.operands
    cache = checks_kvcache.kvcache(q, pick(Cache, others), take=take)
    return {
        "q": q, "k": cache.k_cache, "v": cache.v_cache, "block_table": cache.block_table,
        "num_splits": checks.num_splits(num_splits), "kvcache": True, "new_keys": cache.new,
        "rotary": cache.rotary_cos is not None, "cache_seqlens": cache.cache_seqlens,
        "cache_leftpad": cache.cache_leftpad,
        **{name: value for name, value in others.items() if name not in Cache._fields},
    }  # fmt: skip
