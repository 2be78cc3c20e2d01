"""Tiles as calls of the kernels: one dense call each, or one call for tiles of many sequences."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.call import Gradients, Lengths, Options
from flash_attn.dispatch import autograd, private
from flash_attn.distributed.layout import Layout, Segment, place
from flash_attn.distributed.tiles import Mask, Tile, tiles


@dataclass(frozen=True)
class Dropout:
    """The whole's dropout, and which of its heads are here."""

    p: float
    state: Tensor  # (2,) int64, seed and offset, the same on every rank
    heads: int  # of the whole
    first_head: int

    def rng_state(self, starts: Tensor) -> Tensor:
        """(2 + 3 * b,) int64 for a call whose sequences start there; see ``checks.rng_state``."""
        batch_head = starts[:, :1] * self.heads + self.first_head
        return torch.cat([self.state, torch.cat([batch_head, starts[:, 1:]], 1).flatten()])


@dataclass(frozen=True)
class Scoring:
    """What happens to scores, the same on every rank."""

    softmax_scale: float
    softcap: float
    alibi_slopes: Tensor | None  # (h,) or (b, h); of packed batches (sequences, h)
    deterministic: bool
    packed: bool
    dropout: Dropout | None
    max_logits: bool  # whether rows' largest logits are wanted

    def of_heads(self, heads: slice) -> Scoring:
        slopes, dropout = self.alibi_slopes, self.dropout
        if dropout is not None:
            dropout = replace(dropout, first_head=dropout.first_head + heads.start)
        return replace(
            self, alibi_slopes=None if slopes is None else slopes[..., heads], dropout=dropout
        )

    @property
    def dropout_p(self) -> float:
        return 0.0 if self.dropout is None else self.dropout.p

    def slopes(self, call: Call) -> Tensor | None:
        """(b, h) for a call, or (h,)."""
        if self.alibi_slopes is None or self.alibi_slopes.dim() == 1 or not self.packed:
            return self.alibi_slopes
        return self.alibi_slopes[call.starts[:, 0]]

    def rng_state(self, call: Call, batch: int) -> Tensor | None:
        """``batch``: of q."""
        if self.dropout is None:
            return None
        starts = call.starts
        if not self.packed:  # a slice of every sequence of the batch
            starts = starts.repeat(batch, 1)
            starts[:, 0] = torch.arange(batch, device=starts.device)
        return self.dropout.rng_state(starts)


@dataclass(frozen=True)
class Call:
    """Tiles for one kernel call: what they have in common is in the first."""

    tiles: tuple[Tile, ...]
    rows: range  # of the queries, from the first tile to the last
    keys: range
    lengths: Lengths | None  # gaps between tiles are sequences with one of the two; None: one tile
    # (sequences, 3) int64: which of the layout's, and its first query and key; of a gap, any
    starts: Tensor


class Plan(NamedTuple):
    """All calls of a rank on one source of keys."""

    calls: tuple[Call, ...]
    keys: range  # of the source: what is needed of it, from the first to the last


def _plan(found: list[Tile], packed: bool, device: torch.device) -> Plan:
    alike: dict[tuple, list[Tile]] = defaultdict(list)
    for i, tile in enumerate(found):
        # A dense batch has no packed call; a bias is that of one tile.
        alone = i if not packed or tile.bias else -1
        alike[tile.left, tile.right, tile.sign, alone].append(tile)
    calls = [call for group in alike.values() for call in _calls(group, device)]
    starts, stops = [t.keys.start for t in found], [t.keys.stop for t in found]
    return Plan(tuple(calls), range(min(starts, default=0), max(stops, default=0)))


def _calls(alike: list[Tile], device: torch.device) -> list[Call]:
    """Runs of tiles whose rows and keys only go on."""
    runs: list[list[Tile]] = []
    for tile in alike:
        last = runs[-1][-1] if runs else None
        if last and last.rows.stop <= tile.rows.start and last.keys.stop <= tile.keys.start:
            runs[-1].append(tile)
        else:
            runs.append([tile])
    return [_call(run, device) for run in runs]


def _call(run: list[Tile], device: torch.device) -> Call:
    rows = range(run[0].rows.start, run[-1].rows.stop)
    keys = range(run[0].keys.start, run[-1].keys.stop)
    if len(run) == 1:
        return Call(tuple(run), rows, keys, None, torch.tensor([_start(run[0])], device=device))
    at_q, at_k, starts = [0], [0], []

    def extend(to_row: int, to_key: int, start: tuple[int, int, int]) -> None:
        at_q.append(to_row - rows.start)
        at_k.append(to_key - keys.start)
        starts.append(start)

    for tile in run:
        if tile.rows.start - rows.start > at_q[-1]:
            extend(tile.rows.start, at_k[-1] + keys.start, (0, 0, 0))
        if tile.keys.start - keys.start > at_k[-1]:
            extend(at_q[-1] + rows.start, tile.keys.start, (0, 0, 0))
        extend(tile.rows.stop, tile.keys.stop, _start(tile))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (at_q, at_k))
    longest = [max(b - a for a, b in itertools.pairwise(at)) for at in (at_q, at_k)]
    lengths = Lengths(cu_q, cu_k, *longest)
    return Call(tuple(run), rows, keys, lengths, torch.tensor(starts, device=device))


def _start(tile: Tile) -> tuple[int, int, int]:
    return tile.sequence, tile.first_query, tile.first_key


@functools.lru_cache(maxsize=4096)
def ring_plan(layout: Layout, shard: int, source: int, mask: Mask, device: torch.device) -> Plan:
    """The plan of one shard's queries on another shard's keys."""
    found = tiles(layout.placed(shard), layout.placed(source), mask)
    return _plan(found, layout.packed, device)


@functools.lru_cache(maxsize=256)
def whole_plan(layout: Layout, shard: int, mask: Mask, device: torch.device) -> Plan:
    """The plan of one shard's queries on the keys of all, in the order of the whole."""
    whole = place(Segment(i, 0, length) for i, length in enumerate(layout.lengths))
    return _plan(tiles(layout.placed(shard), whole, mask), layout.packed, device)


def _slice(x: Tensor, at: range, first: int = 0) -> Tensor:
    """Rows of (b, s, h, d), the first of which is number ``first``."""
    return x[:, at.start - first : at.stop - first]


def _options(tile: Tile, slopes: Tensor | None, scoring: Scoring) -> Options:
    return Options(
        dropout_p=scoring.dropout_p, softmax_scale=scoring.softmax_scale, causal=tile.right == 0,
        window_size=(tile.left, tile.right), softcap=scoring.softcap, alibi_slopes=slopes,
        deterministic=scoring.deterministic, return_max_logits=scoring.max_logits,
    )  # fmt: skip


def _biases(call: Call, scoring: Scoring) -> tuple[Tensor | None, Tensor | float]:
    """The slopes for the kernel, and what its logits and LSE lack, (b or 1, h, 1)."""
    slopes, tile = scoring.slopes(call), call.tiles[0]
    if slopes is None or not tile.bias:
        return slopes, 0.0
    lacks = slopes.expand(1, -1) if slopes.dim() == 1 else slopes
    return slopes * tile.sign, (lacks * tile.bias).unsqueeze(-1)


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, first_key: int, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q (b, s, h, d); k, v (b, keys, hk, d), from row ``first_key`` of their source on.

    Returns out (b, rows, h, dv), lse (b, h, rows) and, if wanted, largest logits (b, h, rows) of
    the call's rows.
    """
    slopes, lacks = _biases(call, scoring)
    tensors = _slice(q, call.rows), *(_slice(x, call.keys, first_key) for x in (k, v))
    options = _options(call.tiles[0], slopes, scoring)
    rng_state = scoring.rng_state(call, q.shape[0])
    if call.lengths is None:
        out, lse, largest, _ = private.forward(*tensors, options, rng_state=rng_state)
        if slopes is not None:
            lse = lse + lacks
            largest = largest + lacks if scoring.max_logits else None
        return out, lse, largest if scoring.max_logits else None
    q, k, v = (x[0] for x in tensors)
    out, lse, largest, _ = private.forward(q, k, v, options, call.lengths, rng_state=rng_state)
    return out[None], lse[None], largest[None] if scoring.max_logits else None


class Rows(NamedTuple):
    """What a backward takes of the queries' side, all (b, s, …) or (b, h, s)."""

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None

    @classmethod
    def of(
        cls, dout: Tensor | None, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> Rows:
        """From what autograd hands to a backward."""
        dout = torch.zeros_like(out) if dout is None else autograd.rows_contiguous(dout)
        return cls(dout, q, out, lse, dlse)

    def of_heads(self, heads: slice) -> Rows:
        dlse = None if self.dlse is None else self.dlse[:, heads]
        dout, q, out = (x[:, :, heads] for x in (self.dout, self.q, self.out))
        return Rows(dout, q, out, self.lse[:, heads], dlse)


def backward(
    call: Call, rows: Rows, k: Tensor, v: Tensor, first_key: int, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """dq of the call's rows, dk and dv of its keys; ``rows.lse`` is that of the whole."""
    slopes, lacks = _biases(call, scoring)
    dout, q, out = (_slice(x, call.rows) for x in (rows.dout, rows.q, rows.out))
    at = slice(call.rows.start, call.rows.stop)
    lse = rows.lse[:, :, at]
    lse = lse - lacks if slopes is not None else lse
    dlse = None if rows.dlse is None else rows.dlse[:, :, at]
    k, v = (_slice(x, call.keys, first_key) for x in (k, v))
    gradients = tuple(x.new_empty(x.shape) for x in (q, k, v))
    options = _options(call.tiles[0], slopes, scoring)
    tensors = Gradients(dout, q, k, v, out, lse, *gradients, dlse)
    if call.lengths is not None:
        tensors = Gradients(*(None if x is None else x[0] for x in tensors))
    private.backward(tensors, options, scoring.rng_state(call, q.shape[0]), call.lengths)
    return gradients
