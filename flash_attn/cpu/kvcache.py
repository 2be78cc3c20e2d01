"""Attention over a KV cache: the op `with_kvcache` (rotate, append, attend)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn.call import Cache, CacheStep, Descales, Scoring, accumulation_dtype

from . import latent
from .attend import attend
from .fp8 import Codes
from .paging import Pages
from .rotary import rotate, turns
from .scores import Scores, make_scores


def with_kvcache(call: CacheStep) -> tuple[Tensor, Tensor]:
    """Returns out (b, sq, h, dv) and softmax_lse (b, h, sq); writes k and v into the cache."""
    q, k, v, scoring = call.q, call.cache.k, call.cache.v, call.scoring
    batch, seqlen_q, heads, _ = q.shape
    storage, old = locate(call)
    if call.cache.rotary_cos is not None:
        q, k = _rotate(call, old)
    if k is not None:
        for i in range(batch):
            if old[i] >= 0:
                storage.write(i, old[i], k[i], v[i])
    if storage.codes is not None:
        q = q.to(storage.codes.dtype)
    q = latent.queries(q, call.qv)
    scores = make_scores(q, batch, scoring)
    out = q.new_empty(batch, seqlen_q, heads, call.cache.v_cache.shape[-1])
    lse = q.new_empty(batch, heads, seqlen_q, dtype=accumulation_dtype(q.dtype))
    new = call.cache.new
    _attend_storage(q, storage, [n + new if n >= 0 else 0 for n in old], out, lse, scores)
    return out.to(call.q.dtype), lse


def check_contents(arguments: dict[str, Any]) -> None:
    """Raises for index tensors whose contents lie outside; ``arguments``: the operation's."""
    locate(CacheStep.of(arguments))


def locate(call: CacheStep) -> tuple[Storage, list[int]]:
    """The cache, and how many keys each sequence has in it, -1 for one to skip.

    Raises for contents of the call's tensors that lie outside, before anything is written.
    """
    cache, new = call.cache, call.cache.new
    storage = Storage(cache, call.q, call.descales, call.qv is not None)
    old = storage.lengths(cache.cache_seqlens, new)
    if cache.rotary_cos is not None and old:
        rows = call.q.shape[1] if _is_local(call.scoring) else 1
        _check_positions(cache.rotary_cos, old, max(new, rows))
    if new:
        storage.check_append(old, new)
    return storage, old


def _is_local(scoring: Scoring) -> bool:
    """Whether masks depend on where a query is."""
    return scoring.causal or scoring.window_size_left >= 0 or scoring.window_size_right >= 0


def _check_positions(rotary_cos: Tensor, old: list[int], rows: int) -> None:
    needed = max(0, *old) + rows
    if needed > rotary_cos.shape[0]:
        raise ValueError(
            f"rotary_cos: got {rotary_cos.shape[0]} positions; at least {needed} are needed, the "
            "longest of cache_seqlens plus the new rows"
        )


def _attend_storage(q, storage: Storage, lengths: list[int], out, lse, scores: Scores) -> None:
    whole = storage.whole_batch(lengths)
    if whole is not None:
        attend(q, *whole, out, lse, scores)
        return
    for i, length in enumerate(lengths):
        one = slice(i, i + 1)
        part = scores.part(one, slice(None))
        k, v, hidden = storage.read(i, length)
        attend(q[one], k, v, out[one], lse[one], part, hidden)


def _rotate(call: CacheStep, old: list[int]) -> tuple[Tensor, Tensor]:
    """New keys turn by cache_seqlens + i; queries too if masks are local, else by cache_seqlens."""
    q, k, local = call.q, call.cache.k, _is_local(call.scoring)
    cos, sin, interleaved = call.cache.rotary_cos, call.cache.rotary_sin, call.rotary_interleaved
    starts = [max(n, 0) for n in old]  # a skipped sequence has a position too, which is not read
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


class Storage:
    """Keys and values of each sequence of the batch, wherever they are stored."""

    k: Tensor
    v: Tensor
    codes: Codes | None
    is_latent: bool  # keys have the values' columns too
    pages: Pages | None
    capacity: int
    batch_idx: list[int] | None
    leftpad: list[int]

    def __init__(self, cache: Cache, q: Tensor, descales: Descales, is_latent: bool):
        batch = q.shape[0]
        self.k, self.v = k, v = cache.k_cache, cache.v_cache
        table, batch_idx, leftpad = cache.block_table, cache.cache_batch_idx, cache.cache_leftpad
        self.codes = Codes.of(k, descales, q)
        self.is_latent = is_latent
        self.pages = None if table is None else Pages(k, v, table)
        self.capacity = k.shape[1] if self.pages is None else self.pages.capacity
        self.batch_idx = None if batch_idx is None else batch_idx.tolist()
        self.leftpad = [0] * batch if leftpad is None else leftpad.tolist()
        self.batch = batch
        for i, slot in enumerate(self.batch_idx or ()):
            if not 0 <= slot < k.shape[0]:
                raise ValueError(
                    f"cache_batch_idx[{i}]: got {slot}; 0 to {k.shape[0] - 1}, a row of k_cache, "
                    "is needed"
                )
        if any(pad < 0 for pad in self.leftpad):
            raise ValueError(f"cache_leftpad: got {self.leftpad}; entries of 0 or more are needed")

    def lengths(self, cache_seqlens: Tensor | None, new: int) -> list[int]:
        """Positions of each sequence that are filled already; -1 for one to skip."""
        if cache_seqlens is None:
            lengths = [self.capacity] * self.batch
        else:
            lengths = cache_seqlens.tolist()
        for i, length in enumerate(lengths):
            if length < -1:
                raise ValueError(f"cache_seqlens[{i}]: got {length}; -1 (skip) or more is needed")
            if length >= 0 and length + new > self.capacity:
                raise ValueError(
                    f"cache_seqlens[{i}]: got {length} and {new} new keys; their sum must be at "
                    f"most {self.capacity}, {self._room()} per sequence"
                )
            if length >= 0 and self.leftpad[i] > length + new:
                raise ValueError(
                    f"cache_leftpad[{i}]: got {self.leftpad[i]}; at most {length + new} is needed, "
                    "the keys of the sequence with padding and new ones"
                )
        if self.pages is not None:
            self.pages.check([n + new if n >= 0 else 0 for n in lengths])
        return lengths

    def _room(self) -> str:
        if self.pages is None:
            return f"the cache holds {self.capacity}"
        columns, size = self.pages.table.shape[1], self.pages.page_size
        return f"block_table has room for {columns} pages of {size} keys, {self.capacity} keys,"

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
                        f"cache_batch_idx: got {row} at {owner[row]} and at {i}; a row for each "
                        "sequence that new keys are appended to is needed"
                    )

    def write(self, i: int, start: int, k: Tensor, v: Tensor) -> None:
        keys = slice(start, start + k.shape[0])
        if self.codes is not None:
            k, v = self.codes.encoded(i, (k, v), lambda x: self._rows(x, i, keys))
        if self.pages is not None:
            self.pages.write(i, start, k, v)
            return
        self._rows(self.k, i, keys).copy_(k)
        self._rows(self.v, i, keys).copy_(v)

    def _rows(self, x: Tensor, i: int, keys: slice) -> Tensor:
        """Those of some of a sequence's keys, (length, …), of x that is laid out as the cache is: a
        view, but of pages."""
        if self.pages is not None:
            return self.pages.rows(x, i, keys)
        return x[i if self.batch_idx is None else self.batch_idx[i], keys]

    def read(self, i: int, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """k, v (1, keys, hk, d) after left padding, and which of the keys are missing."""
        keys = slice(min(self.leftpad[i], length), length)
        hidden = None
        if self.pages is not None:
            k, v, hidden = self.pages.read(i, keys)
        else:
            k, v = (self._rows(x, i, keys)[None] for x in (self.k, self.v))
        if self.codes is not None:
            k, v = self.codes.decoded(i, (k, v), lambda x: self._rows(x, i, keys))
        return latent.keys(k, v) if self.is_latent else k, v, hidden

    def whole_batch(self, lengths: list[int]) -> tuple[Tensor, Tensor] | None:
        """k, v (b, keys, hk, d) as views, if all sequences lie alike in the cache.

        None for codes and latent keys: no more of them than those of a sequence are decoded, or
        joined, at a time.
        """
        if self.pages is not None or self.batch_idx is not None or not lengths:
            return None
        if self.codes is not None or self.is_latent:
            return None
        length, pad = lengths[0], self.leftpad[0]
        if any(n != length for n in lengths) or any(n != pad for n in self.leftpad):
            return None
        keys = slice(min(pad, length), length)
        return self.k[: self.batch, keys], self.v[: self.batch, keys]
