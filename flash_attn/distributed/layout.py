"""Which tokens each rank holds: pure arithmetic, the same on every rank, without communication."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn.api import checks

KINDS = ("zigzag", "contiguous", "balanced")


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens of one sequence: positions ``start`` to ``stop`` of it."""

    sequence: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Placed:
    """A segment, and the first of its rows in a rank's tensors."""

    segment: Segment
    row: int


def place(segments: Iterable[Segment]) -> tuple[Placed, ...]:
    """Segments one after the other in a tensor."""
    placed, row = [], 0
    for segment in segments:
        placed.append(Placed(segment, row))
        row += len(segment)
    return tuple(placed)


@dataclass(frozen=True, eq=False)  # compared by identity: plans are cached by it
class Layout:
    """Sequences cut into shards, one for each rank of a ring, in the order of the shard's rows.

    ``split`` ranks share the rows of a shard, each a part of neighbouring rows: all-to-all gives
    each of them all rows for some heads. Rank ``r`` of ``ring * split`` holds part ``r % split`` of
    shard ``r // split``, as in a DeviceMesh of shape (ring, split). Make one with
    :func:`dense_layout` or :func:`packed_layout`, and keep it: plans are cached with it.
    """

    kind: str
    lengths: tuple[int, ...]  # of the sequences
    shards: tuple[tuple[Segment, ...], ...]
    split: int
    packed: bool

    @property
    def ring(self) -> int:
        return len(self.shards)

    @property
    def ranks(self) -> int:
        return self.ring * self.split

    @functools.cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return tuple(starts)

    @property
    def total(self) -> int:
        return self.cu_seqlens[-1]

    @functools.cached_property
    def _placed(self) -> tuple[tuple[Placed, ...], ...]:
        return tuple(place(shard) for shard in self.shards)

    def placed(self, shard: int) -> tuple[Placed, ...]:
        return self._placed[shard]

    @functools.cached_property
    def shard_tokens(self) -> tuple[int, ...]:
        return tuple(sum(map(len, shard)) for shard in self.shards)

    def part_tokens(self, shard: int) -> list[int]:
        """How many rows of a shard each of the ranks that share it holds."""
        rows = self.shard_tokens[shard]
        return [rows * (i + 1) // self.split - rows * i // self.split for i in range(self.split)]

    def tokens(self, rank: int) -> int:
        """How many tokens the rank holds; 0 is fine."""
        return self.part_tokens(rank // self.split)[rank % self.split]

    def segments(self, rank: int) -> list[Segment]:
        """What the rank holds, in the order of its rows."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank: got {rank}; 0 to {self.ranks - 1} is needed")
        shard, part = divmod(rank, self.split)
        rows = self.shard_tokens[shard]
        begin, end = rows * part // self.split, rows * (part + 1) // self.split
        held = []
        for placed in self.placed(shard):
            s, row = placed.segment, placed.row
            first, last = max(begin, row), min(end, row + len(s))
            if first < last:
                held.append(Segment(s.sequence, s.start + first - row, s.start + last - row))
        return held

    def cut_at_multiples_of(self, multiple: int) -> bool:
        """Whether no segment starts within a block of so many tokens of its sequence."""
        return all(s.start % multiple == 0 for shard in self.shards for s in shard)

    @functools.cached_property
    def description(self) -> str:
        """The same on two ranks only if they mean the same layout."""
        digest = hashlib.sha256(repr((self.lengths, self.shards)).encode()).hexdigest()[:12]
        what = f"{len(self.lengths)} sequences" if self.packed else "one sequence"
        return (
            f"{self.kind} layout of {what}, {self.total} tokens, over {self.ring} x {self.split} "
            f"ranks ({digest})"
        )


def dense_layout(
    seqlen: int, ranks: int, kind: str = "zigzag", *, split: int = 1, multiple: int = 1
) -> Layout:
    """One sequence, or a batch of sequences of one length, cut along the sequence.

    Arguments:
        seqlen: of the whole sequence; it need not be a multiple of anything.
        ranks: how many share it, ``split`` times the size of the ring.
        kind: "zigzag" cuts into twice as many chunks as the ring has ranks, and rank r holds chunk
            r and the r-th from the end: under a causal mask all have the same work. "contiguous"
            cuts into one chunk for each. "balanced" cuts so that causal work is equal, and tokens
            are not.
        split: ranks that share a shard by heads (all-to-all); ``ranks`` for all-to-all alone.
        multiple: sequences are cut at multiples of it alone; 16 for dropout.
    """
    seqlen = _count(seqlen, "seqlen", 0)
    return _layout(
        (seqlen,), ranks, kind, split, packed=False, multiple=multiple, work=_causal_work
    )


def packed_layout(
    cu_seqlens: Sequence[int] | Tensor,
    ranks: int,
    kind: str = "balanced",
    *,
    split: int = 1,
    causal: bool = True,
    window: int = -1,
    token_work: int = 0,
    multiple: int = 1,
) -> Layout:
    """Sequences of different lengths, one after the other.

    Arguments:
        cu_seqlens: where each sequence starts, and where the last one ends, from 0; on the host (a
            tensor on a GPU is waited for).
        kind: "balanced" and "contiguous" cut the whole row of tokens into one part for each rank,
            the first so that all have the same work, the second the same number of tokens.
            "zigzag" cuts every sequence as :func:`dense_layout` does.
        causal, window: for "balanced", how many keys a query sees: those of its sequence, up to
            its own with causal, at most ``window`` before it (-1: all).
        token_work: for "balanced", what a token costs beside its attention (projections, MLP), in
            keys; 0 balances attention alone.
        ranks, split, multiple: as in :func:`dense_layout`.
    """
    causal, window = checks.flag(causal, "causal"), checks.integer(window, "window")
    checks.number(token_work, "token_work")
    starts = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else [int(x) for x in cu_seqlens]
    if not starts or starts[0] != 0 or any(a > b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"cu_seqlens: got {starts[:9]}; 0, then ends that never decrease, needed")
    lengths = tuple(b - a for a, b in itertools.pairwise(starts))

    def work(length: int) -> Tensor:
        keys = _causal_work(length) if causal else torch.full((length,), length)
        if window >= 0:
            keys = keys.clamp(max=window + 1 if causal else 2 * window + 1)
        return keys + token_work

    return _layout(lengths, ranks, kind, split, packed=True, multiple=multiple, work=work)


def _count(x, name: str, least: int) -> int:
    x = checks.integer(x, name)
    if x < least:
        raise ValueError(f"{name}: got {x}; {least} or more is needed")
    return x


def _causal_work(length: int) -> Tensor:
    return torch.arange(1, length + 1)


def _layout(
    lengths: tuple[int, ...], ranks: int, kind: str, split: int, packed: bool,
    multiple: int, work: Callable[[int], Tensor],
) -> Layout:  # fmt: skip
    ranks, split = _count(ranks, "ranks", 1), _count(split, "split", 1)
    multiple = _count(multiple, "multiple", 1)
    if ranks % split:
        raise ValueError(f"split: got {split}; a divisor of the {ranks} ranks is needed")
    ring, total = ranks // split, sum(lengths)
    if kind == "zigzag":
        shards = _zigzag(lengths, ring, multiple)
    elif kind == "contiguous":
        cuts = [total * i // ring for i in range(ring + 1)]
        shards = _stretches(lengths, _inside(lengths, cuts, multiple))
    elif kind == "balanced":
        cuts = _equal_work(lengths, ring, work)
        shards = _stretches(lengths, _inside(lengths, cuts, multiple))
    else:
        raise ValueError(f"kind: got {kind!r}; one of {', '.join(KINDS)} is needed")
    return Layout(kind, lengths, shards, split, packed)


def _nearest(at: int, multiple: int, length: int) -> int:
    """The nearest to ``at`` of a sequence's multiples and its end."""
    return min((at + multiple // 2) // multiple * multiple, length) if at < length else length


def _inside(lengths: tuple[int, ...], cuts: list[int], multiple: int) -> list[int]:
    """Cuts of the row of all tokens, moved to multiples of positions in their sequences."""
    starts = list(itertools.accumulate(lengths, initial=0))
    moved = []
    for cut in cuts:
        sequence = max(bisect.bisect_right(starts, cut) - 1, 0)
        length = lengths[sequence] if sequence < len(lengths) else 0
        moved.append(starts[sequence] + _nearest(cut - starts[sequence], multiple, length))
    return moved


def _zigzag(lengths: tuple[int, ...], ring: int, multiple: int) -> tuple[tuple[Segment, ...], ...]:
    shards: list[list[Segment]] = [[] for _ in range(ring)]
    chunks = 2 * ring
    for sequence, length in enumerate(lengths):
        cuts = [_nearest(length * i // chunks, multiple, length) for i in range(chunks + 1)]
        for rank, shard in enumerate(shards):
            for chunk in (rank, chunks - 1 - rank):
                if cuts[chunk] < cuts[chunk + 1]:
                    shard.append(Segment(sequence, cuts[chunk], cuts[chunk + 1]))
    return tuple(map(tuple, shards))


def _stretches(lengths: tuple[int, ...], cuts: list[int]) -> tuple[tuple[Segment, ...], ...]:
    """The row of all tokens, cut at these."""
    shards: list[list[Segment]] = [[] for _ in cuts[1:]]
    begin, rank = 0, 0
    for sequence, length in enumerate(lengths):
        start = 0
        while start < length:
            while cuts[rank + 1] <= begin + start:
                rank += 1
            stop = min(length, cuts[rank + 1] - begin)
            shards[rank].append(Segment(sequence, start, stop))
            start = stop
        begin += length
    return tuple(map(tuple, shards))


def _equal_work(lengths: tuple[int, ...], ring: int, work: Callable[[int], Tensor]) -> list[int]:
    total = sum(lengths)
    if total == 0:
        return [0] * (ring + 1)
    done = torch.cat([work(length) for length in lengths]).cumsum(0)  # (total,)
    shares = torch.arange(1, ring) * done[-1] // ring
    return [0, *torch.searchsorted(done, shares, right=True).tolist(), total]
