"""Tiled forward attention over sequences of equal length, with an online softmax.

Memory is O(seqlen): one tile of scores, one row tile of accumulators, and K and V of a few heads in
the accumulation type (Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao et al. 2022).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.call import accumulation_dtype

from . import tiling
from .scores import (
    Scores,
    add_alibi,
    no_keys,
    tile_keep,
    tile_mask,
)


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores,
    hidden_keys: Tensor | None = None, wanted: Tensor | None = None,
    max_logits: Tensor | None = None,
) -> None:  # fmt: skip
    """Shapes as in attend.attend; wanted (sq,) bool: tiles without such a row are left out."""
    for bs, qs, hs in tiling.head_parts(q, k):
        part = scores.part(bs, qs)
        _forward_part(
            q[bs, :, qs], k[bs, :, hs], v[bs, :, hs], out[bs, :, qs], lse[bs, qs], part,
            hidden_keys, wanted, None if max_logits is None else max_logits[bs, qs],
        )  # fmt: skip


def _forward_part(q, k, v, out, lse, scores, hidden_keys, wanted, max_logits) -> None:
    dtype = accumulation_dtype(q.dtype)
    (batch, seqlen_q), (seqlen_k, kv_heads) = q.shape[:2], k.shape[1:3]
    shift = seqlen_k - seqlen_q
    group, step, base, end = tiling.cut_keys(q, k, scores)
    kf = tiling.keys_first(k[:, base:end], dtype).transpose(1, 2)  # (b * hk, d, keys)
    vf = tiling.keys_first(v[:, base:end], dtype)  # (b * hk, keys, dv)
    for rows in tiling.row_tiles(seqlen_q, group):
        here = slice(rows.start, rows.stop)
        if wanted is not None and not wanted[here].any():
            continue
        state = OnlineSoftmax(scores, batch, kv_heads, group, len(rows), dtype)
        q_tile = tiling.stacked_rows(q[:, here], kv_heads, dtype, scores.query_scale)
        for keys in tiling.key_tiles(scores, rows, shift, seqlen_k, step):
            at = slice(keys.start - base, keys.stop - base)
            place = Place(rows, keys, shift, kv_heads, group)
            tile, _ = score_tile(q_tile, kf[:, :, at], scores, place)
            if hidden_keys is not None:
                tile.masked_fill_(hidden_keys[keys.start : keys.stop], -math.inf)
            keep = None
            if scores.dropout is not None:
                keep = tile_keep(scores.dropout, group, rows, keys).reshape(tile.shape)
            state.add(tile, vf[:, at], keep)
        if state.out is None:
            no_keys(out[:, here], lse[:, :, here], scores)
            if max_logits is not None:
                max_logits[:, :, here] = -math.inf
            continue
        scale = scores.dropout.scale if scores.dropout is not None else 1.0
        tiling.unstack_rows(state.result(scale), out[:, here], kv_heads)
        tiling.unstack_column(state.lse(), lse[:, :, here], kv_heads)
        if max_logits is not None:
            tiling.unstack_column(state.largest, max_logits[:, :, here], kv_heads)


class Place(NamedTuple):
    """Where a tile of scores lies in its sequences, and how heads are stacked into its rows."""

    rows: range
    keys: range
    shift: int  # seqlen_k - seqlen_q
    kv_heads: int
    group: int  # query heads per key head


def score_tile(
    q_tile: Tensor, k_tile: Tensor, scores: Scores, place: Place, want_slope: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Scores after softcap, ALiBi and masks, (b * hk, rows * g, keys), and softcap's derivative.

    q_tile (b * hk, rows * g, d), scaled by scores.query_scale; k_tile (b * hk, d, keys).
    """
    rows, keys, shift, kv_heads, group = place
    tile, slope = torch.bmm(q_tile, k_tile), None
    if scores.softcap:
        tile.tanh_()
        if want_slope:
            slope = tile.square().neg_().add_(1.0).mul_(scores.softcap)
        tile.mul_(scores.softcap)
    by_head = tile.view(-1, kv_heads, len(rows), group, len(keys))
    if scores.slopes is not None:
        slopes = scores.slopes.unflatten(1, (kv_heads, group))
        add_alibi(by_head, slopes, rows, keys, shift)
    hidden = tile_mask(scores, rows, keys, shift)
    if hidden is not None:
        by_head.masked_fill_(hidden[:, None], -math.inf)
    return tile, slope


class OnlineSoftmax:
    """Running maximum, sum and output of one row tile."""

    def __init__(
        self, scores: Scores, batch: int, kv_heads: int, group: int, rows: int, dtype: torch.dtype
    ):
        self.out: Tensor | None = None  # (b * hk, rows * g, dv), unnormalised
        self.max: Tensor | None = None  # (b * hk, rows * g, 1)
        self.sum: Tensor | None = None
        self.largest: Tensor | None = None  # like max, of the keys alone
        if scores.sinks is not None:
            # A sink is a key with this score and a value of zero.
            sinks = scores.sinks.view(1, kv_heads, 1, group).expand(batch, -1, rows, -1)
            self.max = sinks.reshape(batch * kv_heads, rows * group, 1)
            self.sum = torch.ones_like(self.max)

    def add(self, tile: Tensor, v_tile: Tensor, keep: Tensor | None) -> None:
        """Scores (b * hk, rows * g, keys), which it overwrites; values (b * hk, keys, dv)."""
        peak = tile.amax(-1, keepdim=True)
        self.largest = peak if self.largest is None else torch.maximum(peak, self.largest)
        if self.max is not None:
            peak = torch.maximum(peak, self.max)
        # A row that has seen nothing yet has a peak of -inf; 0 keeps -inf - -inf out of the exp.
        safe = peak.masked_fill(peak == -math.inf, 0.0)
        tile.sub_(safe).exp_()
        total = tile.sum(-1, keepdim=True)
        if keep is not None:
            tile.mul_(keep)
        if self.max is not None:
            # A sink of +inf stays what it is: the difference would be NaN.
            decay = self.max.sub(safe).exp_().masked_fill_(self.max == safe, 1.0)
            total.addcmul_(self.sum, decay)
        if self.out is None:
            self.out = torch.bmm(tile, v_tile)
        else:
            self.out.mul_(decay).baddbmm_(tile, v_tile)
        self.max, self.sum = peak, total

    def result(self, scale: float) -> Tensor:
        # Rows that saw nothing have sum 0 and out 0.
        total = self.sum.masked_fill(self.sum == 0, 1.0)
        return self.out.mul_(total.reciprocal().mul_(scale))

    def lse(self) -> Tensor:
        # Where nothing was seen, log(0) + -inf is -inf too.
        return self.sum.log().add_(self.max)
