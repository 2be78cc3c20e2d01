"""One forward, however its rows and keys lie: which function of ``flash_attn`` computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.api import checks, checks_kvcache
from flash_attn.call import Cache, Keys, Lengths, Options
from flash_attn.dispatch import calls, private
from flash_attn_3 import _rows
from flash_attn_3._asked import Asked, into, refuse


def forward(asked: Asked, options: Options, is_cache: bool = False) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp.

    Arguments:
        is_cache: k and v are a cache, though perhaps nothing else says so.
        options: what FlashAttention-3 has no argument for: dropout_p, alibi_slopes, deterministic,
            s_aux. The others are taken from asked.

    Returns:
        out (b, sq, h, dv), or (total_q, h, dv) with cu_seqlens_q, dtype of q; lse (b, h, sq), or
        (h, total_q), float32 (float64 for float64 inputs).

    Raises:
        NotImplementedError: what ``refuse`` names; a backward through a cache.
        TypeError, ValueError: what ``flash_attn`` raises for such tensors.
    """
    refuse(
        asked.qv, asked.q_descale, asked.k_descale, asked.v_descale, asked.attention_chunk,
        asked.seqlens_rotary,
    )  # fmt: skip
    options = options._replace(
        softmax_scale=asked.softmax_scale,
        causal=asked.causal,
        window_size=(asked.window_size_left, asked.window_size_right),
        softcap=asked.softcap,
        return_lse=True,
    )
    out, lse = _served(asked, options, is_cache or asked.has_cache)
    return into(asked.out, out), lse


def _served(asked: Asked, options: Options, is_cache: bool) -> tuple[Tensor, Tensor]:
    checks.tensor(asked.q, "q")
    checks.tensor(asked.k, "k")
    checks.tensor(asked.v, "v")
    if asked.cu_seqlens_k is not None:
        return _packed(asked, options)
    packed = asked.cu_seqlens_q is not None
    if asked.seqused_q is not None and not (packed or is_cache):
        return _packed(asked, options)
    packed_new = asked.k_new is not None and asked.cu_seqlens_k_new is not None
    if packed or packed_new or asked.seqused_q is not None:
        return _cache_of_rows(asked, options)
    if not is_cache:
        checks.num_splits(asked.num_splits)  # which changes nothing here
        return calls.attend(asked.q, asked.k, asked.v, options)
    cache = Cache(
        asked.k, asked.v, asked.k_new, asked.v_new, asked.rotary_cos, asked.rotary_sin,
        asked.seqused_k, asked.kv_batch_idx, asked.leftpad_k, asked.page_table,
    )  # fmt: skip
    return calls.kvcache(asked.q, cache, options, asked.rotary_interleaved, asked.num_splits)


def _flat(x: Tensor, name: str, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """x (rows, heads, head_dim) and its cu_seqlens, of a dense or of a packed tensor."""
    if cu_seqlens is not None:
        return x, cu_seqlens
    if x.dim() != 4:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}; (batch, seqlen, heads, head_dim) is needed "
            "without cu_seqlens"
        )
    return x.flatten(0, 1), _rows.ends(x.shape[0], x.shape[1], x)


def _packed(asked: Asked, options: Options) -> tuple[Tensor, Tensor]:
    """Keys that lie one after the other, or in pages with the lengths of cu_seqlens_k."""
    for name in ("k_new", "v_new", "rotary_cos", "rotary_sin", "kv_batch_idx"):
        if getattr(asked, name) is not None:
            raise ValueError(
                f"{name}: got one with cu_seqlens_k; a cache has page_table or rows of its own, "
                "and cache_seqlens"
            )
    q, cu_q = _flat(asked.q, "q", asked.cu_seqlens_q)
    k, v, cu_k, longest_k = asked.k, asked.v, asked.cu_seqlens_k, asked.max_seqlen_k
    if cu_k is None:
        longest_k = k.shape[1] if k.dim() == 4 else None
        k, cu_k = _flat(k, "k", None)
        v, _ = _flat(v, "v", None)
    if longest_k is None:
        table = asked.page_table
        longest_k = k.shape[0] if table is None else table.shape[-1] * k.shape[1]
    lengths = Lengths(cu_q, cu_k, _longest_q(asked), longest_k)
    keys = Keys(asked.page_table, asked.leftpad_k, asked.seqused_k)
    return _of_rows(asked, q, k, v, options, lengths, keys)


def _longest_q(asked: Asked) -> int | Tensor:
    if asked.cu_seqlens_q is None:
        return asked.q.shape[1]
    return asked.q.shape[0] if asked.max_seqlen_q is None else asked.max_seqlen_q


def _cache_of_rows(asked: Asked, options: Options) -> tuple[Tensor, Tensor]:
    """Queries or new keys of different lengths, beside a cache, whose rows are pages here."""
    q, cu_q = _flat(asked.q, "q", asked.cu_seqlens_q)
    batch, k, v, used, pad = cu_q.shape[0] - 1, asked.k, asked.v, asked.seqused_k, asked.leftpad_k
    checks.operands(q, k, v, checks.VARLEN_Q, checks.PAGES, "k_cache", "v_cache")
    table = asked.page_table
    if table is None:
        table = _rows.as_pages(k, batch, asked.kv_batch_idx)
    elif asked.kv_batch_idx is not None:
        raise ValueError("cache_batch_idx: got one with page_table; pages need none")
    checks.page_table(table, k, "k_cache", batch, q)
    capacity = table.shape[1] * k.shape[1]
    if used is None or not isinstance(used, Tensor):
        used = torch.full(
            (batch,), capacity if used is None else used, dtype=torch.int32, device=q.device
        )
    checks.per_sequence(used, "cache_seqlens", batch, q)
    if asked.k_new is not None or asked.v_new is not None:
        q, used = _with_new_keys(asked, options, q, cu_q, table, used)
    elif asked.rotary_cos is not None or asked.rotary_sin is not None:
        raise ValueError("rotary_cos: got a table without k; rotary turns the new keys and q")
    if pad is not None:
        checks.per_sequence(pad, "cache_leftpad", batch, q)
        pad = torch.where(used > 0, pad, 0)
    q, cache, options = checks_kvcache.without_gradient(q, Cache(k, v), options)
    longest = capacity
    if asked.max_seqlen_k is not None and asked.k_new is None:
        longest = asked.max_seqlen_k
    lengths = Lengths(cu_q, cu_q, _longest_q(asked), longest)
    keys = Keys(table, pad, used.clamp(min=0))
    return _of_rows(asked, q, cache.k_cache, cache.v_cache, options, lengths, keys)


def _with_new_keys(
    asked: Asked, options: Options, q: Tensor, cu_q: Tensor, table: Tensor, old: Tensor
) -> tuple[Tensor, Tensor]:
    """Appends them; returns q, turned if they are, and how many keys there are now."""
    k_new, v_new, cos, sin = asked.k_new, asked.v_new, asked.rotary_cos, asked.rotary_sin
    if k_new is None or v_new is None:
        raise ValueError("k, v: got one of them; they are appended together or not at all")
    if asked.seqused_k is None:
        raise ValueError("cache_seqlens: got None; with new keys it says where they go")
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin come together")
    k_new, cu_new = _flat(k_new, "k", asked.cu_seqlens_k_new)
    v_new, _ = _flat(v_new, "v", asked.cu_seqlens_k_new)
    checks._int32(cu_new, "cu_seqlens_k_new", q)
    if cu_new.shape != cu_q.shape:
        raise checks.bad_shape(cu_new, "cu_seqlens_k_new", f"(batch + 1,) = {tuple(cu_q.shape)}")
    for name, x, cache in (("k", k_new, asked.k), ("v", v_new, asked.v)):
        checks.like_q(x, name, q, torch.compiler.is_compiling())
        if x.dim() != 3 or x.shape[1:] != cache.shape[2:] or x.shape[0] != k_new.shape[0]:
            heads, head_dim = cache.shape[2:]
            raise checks.bad_shape(x, name, f"(total_new, {heads}, {head_dim})")
        checks_kvcache._no_overlap(cache, name)
    cache = Cache(asked.k, asked.v, k_new, v_new, cos, sin)
    q, cache, _ = checks_kvcache.without_gradient(q, cache, options)
    k_new, v_new = cache.k, cache.v
    if cos is not None:
        checks_kvcache._rotary(q, cache, table.shape[1] * asked.k.shape[1], look=True)
        turn = (old, cache.rotary_cos, cache.rotary_sin, asked.rotary_interleaved)
        left, right = options.window_size
        together = not (options.causal or left >= 0 or right >= 0)
        q = _rows.turned(q, cu_q, *turn, together)
        k_new = _rows.turned(k_new, cu_new, *turn)
    with torch.no_grad():
        _rows.append((cache.k_cache, cache.v_cache), (k_new, v_new), cu_new, old, table)
    return q, torch.where(old < 0, 0, old + cu_new.diff())


def _of_rows(
    asked: Asked, q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths, keys: Keys
) -> tuple[Tensor, Tensor]:
    if asked.seqused_q is not None:
        lengths, keys, options = _rows.only_used(q, asked.seqused_q, lengths, keys, options)
    num_splits = checks.num_splits(asked.num_splits)
    out, lse, _, _ = private.forward(q, k, v, options, lengths, keys, num_splits)
    if asked.cu_seqlens_q is None:
        out = out.unflatten(0, asked.q.shape[:2])
        lse = lse.unflatten(1, asked.q.shape[:2]).transpose(0, 1)
    return out, lse
