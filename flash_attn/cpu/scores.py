"""What happens to a score between q.k and the softmax: softcap, ALiBi, masks, dropout.

Positions are those of one sequence: query i, key j, and `shift = seqlen_k - seqlen_q`, which aligns
causal masks, windows and ALiBi to the bottom-right corner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_attn.call import Scoring, accumulation_dtype

from . import philox

UNBOUNDED = 1 << 60  # a window side of -1


@dataclass(frozen=True)
class Dropout:
    """Dropout with probability p; the bits are a function of (seed, offset) and the position."""

    p: float
    seed: int
    offset: int
    head_ids: Tensor  # (b, h) int64: batch * heads_q + head
    # (b, 2) int64: the first query and key in a whole that the call is a part of, in blocks of 16
    first_blocks: Tensor

    @classmethod
    def of_call(cls, p: float, rng_state: Tensor, batch: int, heads: int) -> Dropout:
        """rng_state: seed and offset, and of a part (batch_head, query, key) for each sequence."""
        seed, offset = rng_state[:2].tolist()
        if rng_state.numel() == 2:
            origins = torch.zeros(batch, 3, dtype=torch.int64)
            origins[:, 0] = heads * torch.arange(batch)
        else:
            origins = rng_state[2:].view(batch, 3)
        head_ids = origins[:, :1] + torch.arange(heads)
        return cls(p, seed, offset, head_ids, origins[:, 1:] // philox.BLOCK)

    def part(self, batch: slice, heads: slice) -> Dropout:
        return replace(
            self, head_ids=self.head_ids[batch, heads], first_blocks=self.first_blocks[batch]
        )

    @property
    def scale(self) -> float:
        return 1.0 / philox.kept_share(self.p)


@dataclass(frozen=True)
class Scores:
    """Everything that changes scores, for all sequences and heads of a call (or a part of them)."""

    softmax_scale: float
    left: int  # keys visible to the left of the diagonal; UNBOUNDED for all
    right: int
    softcap: float = 0.0
    slopes: Tensor | None = None  # (b, h) ALiBi slopes in the accumulation type
    sinks: Tensor | None = None  # (h,) in the accumulation type
    dropout: Dropout | None = None

    @property
    def query_scale(self) -> float:
        """Folded into the query tile: one pass over rows x d instead of one over rows x keys."""
        return self.softmax_scale / self.softcap if self.softcap else self.softmax_scale

    def part(self, batch: slice, heads: slice) -> Scores:
        """The same for some sequences and some query heads."""
        changes = {}
        if self.slopes is not None:
            changes["slopes"] = self.slopes[batch, heads]
        if self.sinks is not None:
            changes["sinks"] = self.sinks[heads]
        if self.dropout is not None:
            changes["dropout"] = self.dropout.part(batch, heads)
        return replace(self, **changes) if changes else self


def make_scores(q: Tensor, batch: int, asked: Scoring, rng_state: Tensor | None = None) -> Scores:
    """Scores of an op call.  q (..., h, d) gives the heads and the accumulation type."""
    heads, dtype = q.shape[-2], accumulation_dtype(q.dtype)
    left, right = asked.window_size_left, asked.window_size_right
    slopes = dropout = None
    if asked.alibi_slopes is not None:
        slopes = asked.alibi_slopes.to(dtype).expand(batch, heads)
    if asked.dropout_p > 0.0:
        if rng_state is None:
            raise ValueError(  # as checks.rng_state says it, for operations called directly
                "rng_state: got None; with dropout the backward needs that of the forward"
            )
        dropout = Dropout.of_call(asked.dropout_p, rng_state, batch, heads)
    return Scores(
        softmax_scale=asked.softmax_scale,
        left=left if left >= 0 else UNBOUNDED,
        right=0 if asked.causal else right if right >= 0 else UNBOUNDED,
        softcap=_softcap_in_range(asked.softcap),
        slopes=slopes,
        sinks=None if asked.s_aux is None else asked.s_aux.to(dtype),
        dropout=dropout,
    )


def _softcap_in_range(softcap: float) -> float:
    """As csrc/core/score_mod.h has it: beyond these limits nothing changes but what is computed on
    the way, which would overflow."""
    return min(max(softcap, 1e-20), 1e30) if softcap else 0.0


def visible_keys(scores: Scores, rows: range, shift: int, seqlen_k: int) -> tuple[int, int]:
    """Keys [first, end) that at least one of the rows sees ((0, 0) when none)."""
    first = max(0, rows.start + shift - scores.left)
    end = min(seqlen_k, rows.stop + shift + scores.right)
    return (first, end) if first < end else (0, 0)


def cuts(scores: Scores, rows: range, keys: range, shift: int) -> tuple[bool, bool]:
    """Whether the left and the right limit hide one of the keys from one of the rows."""
    return (
        keys.start < rows.stop - 1 + shift - scores.left,
        keys.stop - 1 > rows.start + shift + scores.right,
    )


def tile_mask(scores: Scores, rows: range, keys: range, shift: int) -> Tensor | None:
    """True where key j is hidden from row i, (rows, keys); None when all are visible."""
    cuts_left, cuts_right = cuts(scores, rows, keys, shift)
    hidden = None
    if cuts_right:
        # j > i + shift + right
        hidden = torch.ones(len(rows), len(keys), dtype=torch.bool)
        hidden = hidden.triu(rows.start + shift + scores.right - keys.start + 1)
    if cuts_left:
        # j < i + shift - left
        before = torch.ones(len(rows), len(keys), dtype=torch.bool)
        before = before.tril(rows.start + shift - scores.left - keys.start - 1)
        hidden = before if hidden is None else hidden.logical_or_(before)
    return hidden


def no_keys(out: Tensor, lse: Tensor, scores: Scores) -> None:
    """Rows that see no key: out (b, s, h, dv) is 0, LSE (b, h, s) is -inf or the sink."""
    out.zero_()
    if scores.sinks is None:
        lse.fill_(-math.inf)
    else:
        lse.copy_(scores.sinks[:, None].expand(lse.shape))


def add_alibi(tile: Tensor, slopes: Tensor, rows: range, keys: range, shift: int) -> None:
    """tile (b, hk, rows, g, keys) -= slope * |i + shift - j|, slopes (b, hk, g)."""
    row = torch.arange(rows.start + shift, rows.stop + shift, dtype=tile.dtype)
    key = torch.arange(keys.start, keys.stop, dtype=tile.dtype)
    distance = (row[:, None] - key).abs_().unsqueeze(1)
    tile.addcmul_(distance, slopes[:, :, None, :, None], value=-1.0)


def tile_keep(dropout: Dropout, group: int, rows: range, keys: range) -> Tensor:
    """1 where dropout keeps an entry, else 0: int8 (b, hk, rows, g, keys)."""
    row_blocks = torch.arange(rows.start >> 4, (rows.stop + 15) >> 4)
    key_blocks = torch.arange(keys.start >> 4, (keys.stop + 15) >> 4)
    head_ids = dropout.head_ids.unflatten(1, (-1, group))
    first_row, first_key = dropout.first_blocks[:, None, None].unbind(-1)  # (b, 1, 1)
    row_blocks, key_blocks = (first_row[..., None] + row_blocks, first_key[..., None] + key_blocks)
    keep = philox.keep_blocks(
        dropout.seed, dropout.offset, head_ids, row_blocks, key_blocks, dropout.p
    )
    row_skip, key_skip = rows.start & 15, keys.start & 15
    keep = keep[..., row_skip : row_skip + len(rows), key_skip : key_skip + len(keys)]
    # Floats times int8 take a third of the time of floats times bool.
    return keep.transpose(2, 3).contiguous().view(torch.int8)
