"""From arguments to one operation: check, resolve defaults, draw the dropout state, call.

The public functions differ in how they take q, k and v; from here on they are the same.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn import _autograd, _checks_kvcache, _ops, _versions, backend, checks


def max_seqlen(x: int | Tensor, name: str, rows: int, exact: bool = False) -> int:
    """The longest sequence as an int.

    A tensor on a GPU is not waited for: kernels need an upper bound alone, and ``rows``, the length
    of the packed tensor, is one. ``exact`` insists, where an output's shape depends on it.
    """
    if isinstance(x, int):
        return x
    if isinstance(x, Tensor) and x.dim() == 0 and not x.is_floating_point():
        return rows if x.is_cuda and not exact else x.item()
    if isinstance(x, torch.SymInt):
        return x
    if not isinstance(x, Tensor) and hasattr(x, "__index__"):  # an integer of numpy's
        return operator.index(x)
    raise TypeError(f"{name}: got {x!r}; an int or a 0-d integer tensor is needed")


def max_seqlens(
    q: Tensor, k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    block_table: Tensor | None = None, exact: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """max_seqlen_q and max_seqlen_k as ints; k is packed, or pages that block_table points to."""
    if not isinstance(max_seqlen_q, int) or not isinstance(max_seqlen_k, int):
        keys = k.shape[0] if block_table is None else block_table.shape[-1] * k.shape[1]
        max_seqlen_q = max_seqlen(max_seqlen_q, "max_seqlen_q", q.shape[0], exact)
        max_seqlen_k = max_seqlen(max_seqlen_k, "max_seqlen_k", keys, exact)
    if torch.compiler.is_compiling():
        # Of a number that comes out of a tensor nothing is known while tracing: what the checks ask
        # is asked when the program runs.
        torch._check(max_seqlen_q >= 0)
        torch._check(max_seqlen_k >= 0)
    return max_seqlen_q, max_seqlen_k


def _has_to_pad(q: Tensor, v: Tensor) -> bool:
    return q.is_cuda and (q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0)


def _padded(*tensors: Tensor | None) -> list[Tensor | None]:
    """Zeros up to a head_dim that is a multiple of 8: CUDA kernels move 16 bytes at a time."""
    return [None if x is None else F.pad(x, (0, -x.shape[-1] % 8)) for x in tensors]


def sinks(s_aux: Tensor | None, q: Tensor) -> Tensor | None:
    return None if s_aux is None else s_aux.to(_ops.lse_dtype(q.dtype)).contiguous()


def dense(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_attn_probs, s_aux, batch_invariant, return_lse,
):  # fmt: skip
    checks.dense(q, k, v)
    left, right = checks.window(window_size)
    checks.scores(q, q.shape[0], dropout_p, softmax_scale, softcap, alibi_slopes, s_aux)
    head_dim = q.shape[-1]
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    if backend.LOG:
        _log(q, k, v, causal, (left, right), softcap, dropout_p, alibi_slopes, s_aux,
             return_attn_probs=return_attn_probs)  # fmt: skip
    head_dim_v = v.shape[-1]
    padded = _has_to_pad(q, v)
    if padded:
        q, k, v = _padded(q, k, v)
    out, lse, probs, _ = _autograd.call(
        _ops.forward, q, k, v, dropout_p, softmax_scale, causal, left, right, softcap,
        alibi_slopes, return_attn_probs, s_aux=sinks(s_aux, q),
        rng_state=_autograd.draw_rng_state(q.device) if dropout_p > 0 else None,
        batch_invariant=batch_invariant, deterministic=deterministic,
    )  # fmt: skip
    if padded:
        out = out.narrow(-1, 0, head_dim_v)
    return _results(out, lse, probs, return_attn_probs, return_lse)


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table,
    s_aux, batch_invariant, return_lse,
):  # fmt: skip
    max_seqlen_q, max_seqlen_k = max_seqlens(
        q, k, max_seqlen_q, max_seqlen_k, block_table, exact=return_attn_probs
    )
    checks.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    left, right = checks.window(window_size)
    batch = cu_seqlens_q.shape[0] - 1
    checks.scores(q, batch, dropout_p, softmax_scale, softcap, alibi_slopes, s_aux)
    head_dim = q.shape[-1]
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    if backend.LOG:
        _log(q, k, v, causal, (left, right), softcap, dropout_p, alibi_slopes, s_aux,
             cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
             block_table=block_table, batch_invariant=batch_invariant,
             return_attn_probs=return_attn_probs)  # fmt: skip
    head_dim_v = v.shape[-1]
    padded = _has_to_pad(q, v)
    if padded:
        q, k, v = _padded(q, k, v)
    out, lse, probs, _ = _autograd.call(
        _ops.varlen_forward, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_attn_probs,
        block_table, s_aux=sinks(s_aux, q),
        rng_state=_autograd.draw_rng_state(q.device) if dropout_p > 0 else None,
        batch_invariant=batch_invariant, deterministic=deterministic,
    )  # fmt: skip
    if padded:
        out = out.narrow(-1, 0, head_dim_v)
    return _results(out, lse, probs, return_attn_probs, return_lse)


def _results(out, lse, probs, return_attn_probs: bool, return_lse: bool):
    if return_attn_probs:
        return out, lse, probs
    return (out, lse) if return_lse else out


def kvcache(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
    cache_leftpad, block_table, softmax_scale, causal, window_size, softcap, rotary_interleaved,
    alibi_slopes, num_splits, return_softmax_lse, s_aux,
):  # fmt: skip
    cache_seqlens = _checks_kvcache.lengths(cache_seqlens)
    num_splits = checks.integer(num_splits, "num_splits")
    _checks_kvcache.kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, num_splits,
    )  # fmt: skip
    _checks_kvcache.no_gradient(
        ("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v), ("s_aux", s_aux)
    )
    left, right = checks.window(window_size)
    checks.scores(q, q.shape[0], 0.0, softmax_scale, softcap, alibi_slopes, s_aux)
    head_dim = q.shape[-1]
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    if rotary_cos is not None:
        rotary_cos, rotary_sin = rotary_cos.to(q.dtype), rotary_sin.to(q.dtype)
    if backend.LOG:
        _log(q, k_cache, v_cache, causal, (left, right), softcap, 0.0, alibi_slopes, s_aux,
             block_table=block_table, cache_seqlens=cache_seqlens, num_splits=num_splits,
             kvcache=True, new_keys=0 if k is None else k.shape[1],
             rotary=rotary_cos is not None)  # fmt: skip
    head_dim_v = v_cache.shape[-1]
    padded = _has_to_pad(q, v_cache)
    caches = k_cache, v_cache
    if padded:
        q, k_cache, v_cache, k, v = _padded(q, k_cache, v_cache, k, v)
    out, lse = _versions.call(
        _ops.with_kvcache, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens,
        cache_batch_idx, cache_leftpad, block_table, softmax_scale, causal, left, right, softcap,
        rotary_interleaved, alibi_slopes, num_splits, s_aux=sinks(s_aux, q),
    )  # fmt: skip
    if padded:
        out = out.narrow(-1, 0, head_dim_v)
        if k is not None:  # the append went to the padded copies
            caches[0].copy_(k_cache.narrow(-1, 0, head_dim))
            caches[1].copy_(v_cache.narrow(-1, 0, head_dim_v))
    return (out, lse) if return_softmax_lse else out


def _log(q, k, v, causal, window_size, softcap, dropout_p, alibi_slopes, s_aux, **rest) -> None:
    if torch.compiler.is_compiling():
        return  # a print would break the graph
    from flash_attn.explain import trace  # flash_attn.explain itself is the function

    trace(
        q, k, v, causal=causal, window_size=window_size, softcap=softcap, dropout_p=dropout_p,
        alibi_slopes=alibi_slopes, s_aux=s_aux, **rest,
    )  # fmt: skip
