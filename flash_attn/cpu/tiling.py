"""How a call is cut: parts (some sequences x some key heads), row tiles, key tiles.

Query heads that share a key head are stacked into the rows of one matrix, so grouped heads cost
neither a copy of K and V nor more, smaller products.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .scores import Scores, visible_keys

# Measured on AVX-512: products of this size run at full speed, a causal diagonal wastes little, and
# a tile of a few (sequence, head) pairs stays in the second-level cache.
ROWS = 128
KEYS = 256


def row_step(group: int) -> int:
    """Rows of a tile, a multiple of 16 so that tiles hold whole blocks of dropout bits."""
    return max(16, ROWS // group // 16 * 16)


def key_step(group: int, rows: int) -> int:
    """Keys of a tile: longer for the few rows of decoding."""
    stacked = group * min(rows, row_step(group))
    return KEYS * max(1, ROWS // (2 * stacked))


def cut_keys(q: Tensor, k: Tensor, scores: Scores) -> tuple[int, int, int, int]:
    """Heads of a group, keys of a tile, and the range of keys that rows of q (b, sq, h, d) see
    among k (b, sk, hk, d); it begins with a whole block of dropout bits."""
    (seqlen_q, heads), (seqlen_k, kv_heads) = q.shape[1:3], k.shape[1:3]
    group = heads // kv_heads
    base, end = visible_keys(scores, range(seqlen_q), seqlen_k - seqlen_q, seqlen_k)
    return group, key_step(group, seqlen_q), base & ~15, end


def pairs_per_part(group: int, seqlen_q: int, seqlen_k: int) -> int:
    """How many (sequence, key head) pairs go through one product: four full tiles' worth."""
    # More threads than that get a pair each.
    rows = group * min(seqlen_q, row_step(group))
    entries = rows * min(seqlen_k, key_step(group, seqlen_q))
    return max(4 * ROWS * KEYS // entries, torch.get_num_threads())


def parts(batch: int, kv_heads: int, pairs: int) -> Iterator[tuple[slice, slice]]:
    """Yields (sequences, key heads) slices of at most `pairs` pairs, one pair at least."""
    head_step = max(1, min(kv_heads, pairs))
    batch_step = max(1, pairs // kv_heads)
    for b in range(0, batch, batch_step):
        for h in range(0, kv_heads, head_step):
            yield slice(b, min(b + batch_step, batch)), slice(h, min(h + head_step, kv_heads))


def head_parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Yields (sequences, heads, key heads) slices of q (b, sq, h, d) and k (b, sk, hk, d)."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    for bs, hs in parts(batch, kv_heads, pairs_per_part(group, seqlen_q, seqlen_k)):
        yield bs, slice(hs.start * group, hs.stop * group), hs


def row_tiles(seqlen_q: int, group: int) -> Iterator[range]:
    step = row_step(group)
    for start in range(0, seqlen_q, step):
        yield range(start, min(start + step, seqlen_q))


def key_tiles(scores: Scores, rows: range, shift: int, seqlen_k: int, step: int) -> Iterator[range]:
    """Key tiles that the rows see; fully hidden ones never appear."""
    first, end = visible_keys(scores, rows, shift, seqlen_k)
    # A function of the row tile alone, whatever the batch; aligned to blocks of dropout bits.
    for start in range(first & ~15, end, step):
        yield range(start, min(start + step, end))


def keys_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(b, s, hk, d) -> (b * hk, s, d) in the accumulation type; a view where that is possible."""
    b, s, hk, d = x.shape
    x = x.transpose(1, 2)
    if x.dtype != dtype:
        x = x.to(dtype, memory_format=torch.contiguous_format)
    return x.reshape(b * hk, s, d)


def stacked_rows(x: Tensor, kv_heads: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """(b, r, hk * g, d) -> (b * hk, r * g, d): a fresh, scaled copy in the accumulation type."""
    b, r, h, d = x.shape
    group = h // kv_heads
    stacked = torch.empty((b, kv_heads, r, group, d), dtype=dtype)
    stacked.copy_(x.unflatten(2, (kv_heads, group)).transpose(1, 2))
    stacked = stacked.view(b * kv_heads, r * group, d)
    return stacked.mul_(scale) if scale != 1.0 else stacked


def unstack_rows(stacked: Tensor, like: Tensor, kv_heads: int) -> None:
    """Writes (b * hk, r * g, d) back into like (b, r, hk * g, d)."""
    b, r, h, d = like.shape
    group = h // kv_heads
    source = stacked.view(b, kv_heads, r, group, d).transpose(1, 2)
    like.unflatten(2, (kv_heads, group)).copy_(source)


def stacked_column(x: Tensor, kv_heads: int) -> Tensor:
    """(b, hk * g, r) -> (b * hk, r * g, 1)"""
    return x.unflatten(1, (kv_heads, -1)).transpose(2, 3).reshape(x.shape[0] * kv_heads, -1, 1)


def unstack_column(stacked: Tensor, like: Tensor, kv_heads: int) -> None:
    """Writes (b * hk, r * g, 1) back into like (b, hk * g, r)."""
    b, h, r = like.shape
    source = stacked.view(b, kv_heads, r, h // kv_heads).transpose(2, 3)
    like.unflatten(1, (kv_heads, -1)).copy_(source)
