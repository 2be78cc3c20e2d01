"""Which tokens each chunk holds: the only reader of sequence lengths on torch operations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Segment", "Table", "table_of"]


class Segment(NamedTuple):
    """Some columns of a table, chunks that are computed at a time."""

    rows: Tensor  # [chunks, C] int64 rows of the flattened tokens; 0 where there is no token
    is_token: Tensor  # [chunks, C] bool
    is_full: bool  # whether there is a token everywhere
    columns: list[Tensor]  # for each column, in order: the sequences whose chunks are next

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [tokens, H, D] -> [chunks, H, C, D], zeros where there is no token."""
        chunks, size = self.rows.shape
        found = x.index_select(0, self.rows.flatten()).unflatten(0, (chunks, size))
        found = found.to(dtype)
        if not self.is_full:
            found = found.masked_fill(~self.is_token[:, :, None, None], 0)
        return found.transpose(1, 2)

    def scatter(self, out: Tensor, x: Tensor) -> None:
        """x [chunks, H, C, D] to its tokens in out [tokens, H, D]."""
        x = x.transpose(1, 2)
        tokens = x.flatten(0, 1) if self.is_full else x[self.is_token]
        rows = self.rows.flatten() if self.is_full else self.rows[self.is_token]
        out.index_copy_(0, rows, tokens.to(out.dtype))


class Table(NamedTuple):
    """The chunks of all sequences: column c has the c-th chunk of each sequence that is as long.

    Chunks are counted from their sequence's start, so that no result depends on its neighbours.
    """

    starts: list[int]  # first token of each sequence, among B * T
    lengths: list[int]
    chunk_size: int
    device: torch.device

    def segments(self, chunks: int) -> Iterator[Segment]:
        """All columns in order, as many at a time as hold ``chunks`` chunks, and at least one."""
        taken: list[Tensor] = []
        for column in self._columns():
            if taken and sum(map(len, taken)) + len(column) > chunks:
                yield self._segment(taken)
                taken = []
            taken.append(column)
        if taken:
            yield self._segment(taken)

    def _columns(self) -> Iterator[Tensor]:
        """[sequences, 2] int64 each: a sequence, and the number of its chunk."""
        counts = torch.tensor([-(-length // self.chunk_size) for length in self.lengths])
        for number in range(int(counts.max()) if len(counts) else 0):
            sequences = (counts > number).nonzero().flatten()
            yield torch.stack((sequences, torch.full_like(sequences, number)), 1)

    def _segment(self, columns: list[Tensor]) -> Segment:
        sequences, numbers = torch.cat(columns).unbind(1)
        starts, lengths = torch.tensor(self.starts), torch.tensor(self.lengths)
        position = numbers[:, None] * self.chunk_size + torch.arange(self.chunk_size)
        is_token = position < lengths[sequences][:, None]
        rows = torch.where(is_token, starts[sequences][:, None] + position, 0)
        return Segment(
            rows.to(self.device),
            is_token.to(self.device),
            bool(is_token.all()),
            list(sequences.to(self.device).split(list(map(len, columns)))),
        )


def table_of(x: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> Table:
    """The chunks of x [B, T, ...]."""
    batch, seqlen = x.shape[:2]
    if cu_seqlens is None:
        starts = [b * seqlen for b in range(batch)]
        return Table(starts, [seqlen] * batch, chunk_size, x.device)
    edges = cu_seqlens.tolist()
    if edges[0] < 0 or edges[-1] > seqlen or any(a > b for a, b in itertools.pairwise(edges)):
        raise ValueError(
            f"cu_seqlens: got {edges}; numbers in [0, T = {seqlen}] that do not decrease are needed"
        )
    lengths = [end - start for start, end in itertools.pairwise(edges)]
    return Table(edges[:-1], lengths, chunk_size, x.device)


@functools.cache
def lower(size: int, diagonal: int, device: torch.device) -> Tensor:
    """[size, size] bool: True where column - row <= diagonal."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril(diagonal)
