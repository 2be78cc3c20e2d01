"""`flash_attn_with_kvcache` written out: gather each sequence's keys, then attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

MINUS_INF = float("-inf")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding in float64 (Su et al., 2021), x (s, h, d), positions (s,).

    cos, sin (max_position, rotary_dim / 2).  The first rotary_dim channels turn; the rest stay.
    """
    half = cos.shape[1]
    x = x.double()
    c, s = cos.double()[positions][:, None], sin.double()[positions][:, None]  # (s, 1, rd / 2)
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        turned = torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        turned = torch.cat([a * c - b * s, a * s + b * c], dim=-1)
    return torch.cat([turned, x[..., 2 * half :]], dim=-1)


@dataclass
class CacheResult:
    out: Tensor  # (b, sq, h, dv)
    lse: Tensor  # (b, h, sq)
    k_cache: Tensor  # like the argument, after the append
    v_cache: Tensor
    touched: Tensor = field(repr=False)  # bool (pages or batch, rows): where rows were written


def cache_slot(b: int, position: int, block_table, cache_batch_idx, page_size: int):
    """Where position `position` of sequence b lives: (first index, row), or None if nowhere."""
    if block_table is not None:
        page = int(block_table[b, position // page_size])
        return None if page < 0 else (page, position % page_size)
    first = b if cache_batch_idx is None else int(cache_batch_idx[b])
    return None if first < 0 else (first, position)


def gather_rows(cache: Tensor, slots: list) -> Tensor:
    """(len(slots), hk, d)."""
    if not slots:
        return cache.new_zeros(0, *cache.shape[2:])
    return torch.stack([cache[first, row] for first, row in slots])


def kvcache_ref(
    attention: Callable,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: list[int],
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: list[int] | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    stored: Callable | None = None,
    **kwargs,
) -> CacheResult:
    """The call with `attention` (`attention_ref` or `standard_attention`) per sequence.

    stored: what the caches keep of new rows at a place: two tensors (hk, d); None is the rows.
    """
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    touched = torch.zeros(k_cache.shape[:2], dtype=torch.bool, device=q.device)
    batch, seqlen_q = q.shape[:2]
    new_rows = 0 if k is None else k.shape[1]
    local = causal or window_size != (-1, -1)
    outs, lses = [], []
    for b in range(batch):
        length = cache_seqlens[b]
        seqlen = length + new_rows if length >= 0 else 0
        place = [
            cache_slot(b, n, block_table, cache_batch_idx, k_cache.shape[1]) for n in range(seqlen)
        ]
        q_b = q[b]
        if rotary_cos is not None and length >= 0:
            turn = torch.arange(seqlen_q, device=q.device) * int(local) + length
            q_b = rotate(q_b, rotary_cos, rotary_sin, turn, rotary_interleaved).to(q.dtype)
        for n in range(new_rows if length >= 0 else 0):
            row = k[b, n : n + 1]
            if rotary_cos is not None:
                at = torch.tensor([length + n], device=q.device)
                row = rotate(row, rotary_cos, rotary_sin, at, rotary_interleaved).to(k.dtype)
            at = place[length + n]
            kept = (row[0], v[b, n]) if stored is None else stored(at)
            k_cache[at], v_cache[at] = kept
            touched[at] = True
        place = place[cache_leftpad[b] if cache_leftpad is not None else 0 :]
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        out, lse, _ = attention(
            q_b[None],
            gather_rows(k_cache, place)[None],
            gather_rows(v_cache, place)[None],
            causal=causal,
            window_size=window_size,
            alibi_slopes=slopes,
            **kwargs,
        )
        outs.append(out[0])
        lses.append(lse[0])
    return CacheResult(torch.stack(outs), torch.stack(lses), k_cache, v_cache, touched)
