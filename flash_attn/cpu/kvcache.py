"""Attention over a KV cache: the op `with_kvcache` (rotate, append, attend)."""

from __future__ import annotations

import torch
from torch import Tensor

from .attend import attend
from .paging import Pages
from .rotary import rotate, turns
from .scores import Scores, accumulation_dtype, make_scores


def with_kvcache(
    q: Tensor,  # (b, sq, h, d)
    k_cache: Tensor,  # (b_cache, s_cache, hk, d), or pages (num_pages, page_size, hk, d)
    v_cache: Tensor,
    k: Tensor | None,  # (b, s_new, hk, d), appended
    v: Tensor | None,
    rotary_cos: Tensor | None,  # (max_positions, rotary_dim / 2)
    rotary_sin: Tensor | None,
    cache_seqlens: Tensor | None,  # (b,) int32; None: the cache is full; -1: skip the sequence
    cache_batch_idx: Tensor | None,  # (b,) int32
    cache_leftpad: Tensor | None,  # (b,) int32
    block_table: Tensor | None,  # (b, pages_per_sequence) int32
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    alibi_slopes: Tensor | None,
    num_splits: int,
    *,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns out (b, sq, h, dv) and softmax_lse (b, h, sq); writes k and v into the cache."""
    batch, seqlen_q, heads, _ = q.shape
    cache, old = locate(
        q, k_cache, v_cache, k, rotary_cos, cache_seqlens, cache_batch_idx, cache_leftpad,
        block_table, causal, window_size_left, window_size_right,
    )  # fmt: skip
    if rotary_cos is not None:
        local = _is_local(causal, window_size_left, window_size_right)
        q, k = _rotate(q, k, rotary_cos, rotary_sin, old, local, rotary_interleaved)
    if k is not None:
        for i in range(batch):
            if old[i] >= 0:
                cache.write(i, old[i], k[i], v[i])
    scores = make_scores(
        q, batch, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, s_aux,
    )  # fmt: skip
    out = q.new_empty(batch, seqlen_q, heads, v_cache.shape[-1])
    lse = q.new_empty(batch, heads, seqlen_q, dtype=accumulation_dtype(q.dtype))
    new = 0 if k is None else k.shape[1]
    _attend_cache(q, cache, [n + new if n >= 0 else 0 for n in old], out, lse, scores)
    return out, lse


def locate(
    q, k_cache, v_cache, k, rotary_cos, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
    causal, window_size_left, window_size_right,
) -> tuple[Cache, list[int]]:  # fmt: skip
    """The cache, and how many keys each sequence has in it, -1 for one to skip.

    Raises for contents of the call's tensors that lie outside, before anything is written.
    """
    new = 0 if k is None else k.shape[1]
    cache = Cache(k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad, q.shape[0])
    old = cache.lengths(cache_seqlens, new)
    if rotary_cos is not None and old:
        local = _is_local(causal, window_size_left, window_size_right)
        _check_positions(rotary_cos, old, max(new, q.shape[1] if local else 1))
    if new:
        cache.check_append(old, new)
    return cache, old


def _is_local(causal: bool, window_size_left: int, window_size_right: int) -> bool:
    """Whether masks depend on where a query is."""
    return causal or window_size_left >= 0 or window_size_right >= 0


def _check_positions(rotary_cos: Tensor, old: list[int], rows: int) -> None:
    needed = max(0, *old) + rows
    if needed > rotary_cos.shape[0]:
        raise ValueError(
            f"rotary_cos has {rotary_cos.shape[0]} positions; expected at least {needed}, the "
            "longest of cache_seqlens plus the new rows"
        )


def _attend_cache(q, cache: Cache, lengths: list[int], out, lse, scores: Scores) -> None:
    whole = cache.whole_batch(lengths)
    if whole is not None:
        attend(q, *whole, out, lse, scores)
        return
    for i, length in enumerate(lengths):
        one = slice(i, i + 1)
        part = scores.part(one, slice(None))
        k, v, hidden = cache.read(i, length)
        attend(q[one], k, v, out[one], lse[one], part, hidden)


def _rotate(q, k, cos, sin, old: list[int], local: bool, interleaved: bool):
    """New keys turn by cache_seqlens + i; queries too if masks are local, else by cache_seqlens."""
    starts = [max(n, 0) for n in old]  # a skipped sequence has a position too, read by nobody
    if not starts:
        return q, k
    heads, length = q.shape[2], k.shape[1]
    turn = turns(cos, sin, starts, length)
    if local and q.shape[1] == length:
        # One pass over both: a decoding step is all overhead.
        both = rotate(torch.cat([q, k], dim=2), turn, interleaved)
        return both[:, :, :heads], both[:, :, heads:]
    k = rotate(k, turn, interleaved)
    return rotate(q, turns(cos, sin, starts, q.shape[1] if local else 1), interleaved), k


class Cache:
    """Keys and values of each sequence of the batch, wherever they are stored."""

    def __init__(self, k, v, block_table, batch_idx, leftpad, batch: int):
        self.k, self.v = k, v
        self.pages = None if block_table is None else Pages(k, v, block_table)
        self.capacity = k.shape[1] if self.pages is None else self.pages.capacity
        self.batch_idx = None if batch_idx is None else batch_idx.tolist()
        self.leftpad = [0] * batch if leftpad is None else leftpad.tolist()
        self.batch = batch
        for i, slot in enumerate(self.batch_idx or ()):
            if not 0 <= slot < k.shape[0]:
                raise ValueError(
                    f"cache_batch_idx[{i}] is {slot}; expected 0 to {k.shape[0] - 1}, "
                    "a row of k_cache"
                )
        if any(pad < 0 for pad in self.leftpad):
            raise ValueError(f"cache_leftpad is {self.leftpad}; expected no negative entry")

    def lengths(self, cache_seqlens: Tensor | None, new: int) -> list[int]:
        """Positions of each sequence that are filled already; -1 for one to skip."""
        if cache_seqlens is None:
            lengths = [self.capacity] * self.batch
        else:
            lengths = cache_seqlens.tolist()
        for i, length in enumerate(lengths):
            if length < -1:
                raise ValueError(f"cache_seqlens[{i}] is {length}; expected -1 (skip) or more")
            if length >= 0 and length + new > self.capacity:
                raise ValueError(
                    f"cache_seqlens[{i}] is {length} and {new} new keys are appended, but the "
                    f"cache holds {self.capacity} per sequence; expected cache_seqlens + new keys "
                    f"to be at most {self.capacity}"
                )
        if self.pages is not None:
            self.pages.check([n + new if n >= 0 else 0 for n in lengths])
        return lengths

    def check_append(self, old: list[int], new: int) -> None:
        """Where one sequence's new keys go, no other sequence has any: order would decide."""
        live = [i for i in range(self.batch) if old[i] >= 0]
        if self.pages is not None:
            self.pages.check_append(live, old, self.leftpad, new)
        elif self.batch_idx is not None:
            owner: dict[int, int] = {}
            for i in live:
                row = self.batch_idx[i]
                if owner.setdefault(row, i) != i:
                    raise ValueError(
                        f"cache_batch_idx[{owner[row]}] and cache_batch_idx[{i}] are both {row}; "
                        "expected a row for each sequence that new keys are appended to"
                    )

    def write(self, i: int, start: int, k: Tensor, v: Tensor) -> None:
        if self.pages is not None:
            self.pages.write(i, start, k, v)
            return
        row = i if self.batch_idx is None else self.batch_idx[i]
        self.k[row, start : start + k.shape[0]] = k
        self.v[row, start : start + k.shape[0]] = v

    def read(self, i: int, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """k, v (1, keys, hk, d) after left padding, and which of the keys are missing."""
        keys = slice(min(self.leftpad[i], length), length)
        if self.pages is not None:
            return self.pages.read(i, keys)
        row = i if self.batch_idx is None else self.batch_idx[i]
        return self.k[row : row + 1, keys], self.v[row : row + 1, keys], None

    def whole_batch(self, lengths: list[int]) -> tuple[Tensor, Tensor] | None:
        """k, v (b, keys, hk, d) as views, if all sequences lie alike in the cache."""
        if self.pages is not None or self.batch_idx is not None or not lengths:
            return None
        length, pad = lengths[0], self.leftpad[0]
        if any(n != length for n in lengths) or any(n != pad for n in self.leftpad):
            return None
        keys = slice(min(pad, length), length)
        return self.k[: self.batch, keys], self.v[: self.batch, keys]
