"""Launches on one stream: when their thread blocks may run, and which tiles they then have.

As core/early_launch.h says it: a launch starts when all before it have ended. An early one starts
when the one before lets it, which is when all of that one's blocks have begun, or have ended, and
its blocks may wait until that one has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from types import ModuleType


class Counter:
    """atomicInc on one word."""

    def __init__(self):
        self.value = 0

    def take(self, last: int) -> int:
        before = self.value
        self.value = 0 if before >= last else before + 1
        return before


@dataclass(frozen=True)
class Launch:
    """blocks: at most as many as tiles. counts: what they draw from (launch/counter_arena.h)."""

    tiles: int
    blocks: int
    counts: str = ""
    draws_first: bool = False
    early: bool = False
    waits_first: bool = False  # else an early launch waits at its end
    lets_next: bool = True  # as soon as its blocks have begun


def plain(tiles: int) -> list[Launch]:
    """A forward."""
    return [Launch(tiles, min(tiles, 4), "Tiles")]


def largest(tiles: int) -> list[Launch]:
    """A forward that is asked for heads' largest logits, behind the launch that makes them -inf."""
    return [Launch(1, 1), Launch(tiles, min(tiles, 4), "Tiles", early=True)]


def merging(tiles: int) -> Launch:
    return Launch(tiles, tiles, early=True, waits_first=True, lets_next=False)


def in_parts(tiles: int) -> list[Launch]:
    """A forward whose keys are cut."""
    return [*plain(tiles), merging(tiles)]


def beside(tiles: int) -> list[Launch]:
    """A packed batch: a forward, and decode of others of its sequences."""
    return [*plain(tiles), Launch(tiles, tiles, early=True, lets_next=False)]


def backward(tiles: int) -> list[Launch]:
    drawn = Launch(tiles, min(tiles, 4), "Tiles", True, early=True, waits_first=True)
    return [Launch(tiles, tiles), drawn, merging(tiles)]


CALLS = {call.__name__: call for call in (plain, largest, in_parts, beside, backward)}


@dataclass
class Running:
    """A launch of a stream. done: tiles, in the order in which blocks got them."""

    launch: Launch
    before: Running | None
    begun: int = 0
    ended: int = 0
    done: list[int] = field(default_factory=list)

    def has_ended(self) -> bool:
        return self.ended == self.launch.blocks

    def lets_next(self) -> bool:
        return self.begun == self.launch.blocks if self.launch.lets_next else self.has_ended()

    def may_start(self) -> bool:
        if self.before is None:
            return True
        return self.before.lets_next() if self.launch.early else self.all_before_have_ended()

    def all_before_have_ended(self) -> bool:
        before = self.before
        return before is None or (before.has_ended() and before.all_before_have_ended())

    def block(self, core: ModuleType, number: int, counters: dict[str, Counter]) -> Iterator[bool]:
        """What a block does, step by step; False: it waits."""
        launch = self.launch

        def wait() -> Iterator[bool]:
            while launch.early and self.before and not self.before.has_ended():
                yield False

        self.begun += 1
        if launch.waits_first:
            yield from wait()
        draws = launch.draws_first or launch.tiles > launch.blocks
        queue = core.TileQueue(num_tiles=launch.tiles, draws=draws, draws_first=launch.draws_first)
        how = dict(num_blocks=launch.blocks, take=counters[launch.counts].take)
        tile = queue.first(block=number, **how)
        while tile < launch.tiles:
            self.done.append(tile)
            yield True
            tile = queue.next(**how)
        yield from wait()
        self.ended += 1


def run(core: ModuleType, launches: list[Launch], random: Random) -> tuple[bool, bool]:
    """Whether each launch did each of its tiles once, and whether all counters are 0 afterwards."""
    counters: dict[str, Counter] = defaultdict(Counter)
    stream: list[Running] = []
    for launch in launches:
        stream.append(Running(launch, stream[-1] if stream else None))
    waiting = [(r, r.block(core, n, counters)) for r in stream for n in range(r.launch.blocks)]
    running: list[Iterator[bool]] = []
    patience = 0
    while waiting or running:
        startable = [item for item in waiting if item[0].may_start()]
        assert startable or running
        if startable and (not running or random.random() < 0.5):
            item = random.choice(startable)
            waiting.remove(item)
            running.append(item[1])
        block = random.choice(running)
        moved = next(block, None)
        if moved is None:
            running.remove(block)
        patience = patience + 1 if moved is False else 0
        assert patience < 10_000, "blocks wait for ever"
    right = all(sorted(r.done) == list(range(r.launch.tiles)) for r in stream)
    return right, not any(counter.value for counter in counters.values())
