"""Which rectangles of the score matrix a rank computes with the keys of another one.

Everything a rank computes is a few calls of the ordinary kernels on slices of its queries and of
some rank's keys. The kernels align masks to the bottom-right corner of what they are given, so a
window of a slice is that of the whole, moved by how far the ends of both slices lie apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from flash_attn.distributed.layout import Placed, Segment


class Mask(NamedTuple):
    """What a query at position p sees: keys p - left to p + right; -1 is unbounded."""

    left: int
    right: int
    alibi: bool = False  # ALiBi's distances count too
    # Tiles start at multiples of it, and hold neighbours only: dropout draws bits for blocks of 16.
    block: int = 1


@dataclass(frozen=True)
class Tile:
    """Some rows of a rank's queries against some rows of a source of keys, for one kernel call."""

    sequence: int
    rows: range
    keys: range
    left: int  # the kernel's window; -1 is unbounded
    right: int
    first_query: int  # the positions in the sequence that its first row and key have
    first_key: int
    # ALiBi's bias of the whole is this times the slope, plus the kernel's with slope * sign.
    bias: int = 0
    sign: int = 1

    @property
    def unmasked(self) -> bool:
        return self.left < 0 and self.right < 0

    @property
    def causal(self) -> bool:
        return self.left < 0 and self.right == 0


def tiles(queries: Iterable[Placed], keys: Iterable[Placed], mask: Mask) -> list[Tile]:
    """All that the queries see of the keys, each pair once."""
    by_sequence = defaultdict(list)
    for key in keys:
        by_sequence[key.segment.sequence].append(key)
    found: dict[int, list[Tile]] = defaultdict(list)
    for query in queries:
        sequence = query.segment.sequence
        for key in by_sequence.get(sequence, ()):
            found[sequence] += _pair(query, key, mask)
    if mask.alibi:
        return [tile for group in found.values() for tile in group]
    neighbours = mask.block > 1
    return [tile for group in found.values() for tile in _joined(group, neighbours)]


def _pair(query: Placed, key: Placed, mask: Mask) -> Iterator[Tile]:
    """The tiles of two segments of one sequence."""
    query, key = _visible(query, key, mask)
    if len(query.segment) <= 0 or len(key.segment) <= 0:
        return
    query, key = (_whole_blocks(x, mask.block) for x in (query, key))
    q, k = query.segment, key.segment
    ahead = q.stop - k.stop  # of the key on the kernel's diagonal, in positions
    if mask.alibi and ahead and k.start < q.stop and q.start < k.stop:
        # Distances grow to both sides of the diagonal: what lies before, on and after it apart.
        for start, stop in ((k.start, q.start), (q.start, q.stop), (q.stop, k.stop)):
            yield from _pair(query, _cut(key, max(start, k.start), min(stop, k.stop)), mask)
        return
    left = mask.left - ahead if mask.left >= 0 else -1
    right = mask.right + ahead if mask.right >= 0 else -1
    if ahead:  # limits that limit nothing are left out, so that tiles look alike
        left = -1 if left >= len(k) - 1 else left
        right = -1 if right >= len(q) - 1 else right
    tile = Tile(
        q.sequence,
        range(query.row, query.row + len(q)),
        range(key.row, key.row + len(k)),
        left,
        right,
        q.start,
        k.start,
    )
    yield from _one_sided(tile, ahead) if mask.alibi and ahead else (tile,)


def _visible(query: Placed, key: Placed, mask: Mask) -> tuple[Placed, Placed]:
    """Without the queries that see none of the keys and the keys that none of the queries sees.

    What is left has the kernel's limits at 0 or above, where they mean a limit.
    """
    q, k = query.segment, key.segment
    if mask.left >= 0:
        query = _cut(query, q.start, min(q.stop, k.stop + mask.left))
        key = _cut(key, max(k.start, q.start - mask.left), k.stop)
    if mask.right >= 0:
        key = _cut(key, key.segment.start, min(k.stop, q.stop + mask.right))
        query = _cut(query, max(q.start, k.start - mask.right), query.segment.stop)
    return query, key


def _cut(placed: Placed, start: int, stop: int) -> Placed:
    segment = placed.segment
    return Placed(
        Segment(segment.sequence, start, max(start, stop)), placed.row + start - segment.start
    )


def _whole_blocks(placed: Placed, block: int) -> Placed:
    """From the start of a block on, which a segment's own start is: what this adds is masked."""
    segment = placed.segment
    return _cut(placed, segment.start - segment.start % block, segment.stop)


def _one_sided(tile: Tile, ahead: int) -> Iterator[Tile]:
    """ALiBi where all keys lie on one side of all queries.

    The kernel's distance is |x|, x counted from its own diagonal; the whole's is |x + ahead|, which
    has the sign of ``ahead`` throughout. So the kernel's bias is that of the whole up to a constant
    below its diagonal, and above it with the slope's sign changed: two calls, one for each side,
    and the constant belongs to the LSE. The part above leaves out the last query, which moves the
    kernel's diagonal by one: no entry is counted twice.
    """
    side = 1 if ahead > 0 else -1
    yield replace(tile, right=0, bias=-side * ahead, sign=side)
    if tile.right != 0 and len(tile.rows) > 1:
        yield replace(
            tile,
            rows=tile.rows[:-1],
            left=0,
            right=tile.right - 1 if tile.right > 0 else -1,
            bias=-side * (ahead - 1),
            sign=-side,
        )


def _joined(tiles: list[Tile], neighbours: bool) -> list[Tile]:
    """The same as fewer, larger tiles. neighbours: in which positions go on from row to row."""
    joined: list[Tile] = []
    for tile in tiles:
        joined.append(tile)
        while len(joined) > 1 and (one := _join(*joined[-2:], neighbours)) is not None:
            joined[-2:] = [one]
    if len(joined) < len(tiles):
        return _joined(joined, neighbours)
    return joined


def _join(a: Tile, b: Tile, neighbours: bool) -> Tile | None:
    """One tile for two, the second to the right of the first or below it."""
    apart = b.first_query - a.first_query - (b.rows.start - a.rows.start) or (
        b.first_key - a.first_key - (b.keys.start - a.keys.start)
    )
    if neighbours and apart:
        return None
    if a.rows == b.rows and a.keys.stop == b.keys.start:
        # A causal tile of more rows than keys has rows that see nothing; the joined one has none.
        if a.unmasked and (b.unmasked or (b.causal and len(b.keys) >= len(b.rows))):
            return replace(b, keys=range(a.keys.start, b.keys.stop), first_key=a.first_key)
        return None
    if a.rows.stop != b.rows.start or a.keys.start != b.keys.start:
        return None
    grown = b.keys.stop - a.keys.stop
    if (a.unmasked and b.unmasked and grown == 0) or (
        a.causal and b.causal and grown == len(b.rows)
    ):
        return replace(b, rows=range(a.rows.start, b.rows.stop), first_query=a.first_query)
    return None
