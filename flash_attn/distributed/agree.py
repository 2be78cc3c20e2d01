"""All ranks make the same call, or all of them say why not.

A rank that sends what another does not expect ends in a timeout at best. So before the first call
of a kind the ranks tell each other what they are about to do; what they agreed on is remembered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist

_REMEMBERED = 4096  # kinds of calls; packed batches that all differ would be remembered for ever


class _Memory(weakref.WeakKeyDictionary[dist.ProcessGroup, "_Memory"]):
    """The kinds of calls that some groups agreed on, and for each group the memory of these and it.

    Ranks that share such a memory made every call that is in it, so that all know the same kinds
    and forget them at once. A group among several groups cannot share one: some of its ranks may
    have made calls in which ranks of the others had no part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[Hashable] = set()

    def of(self, groups: Sequence[dist.ProcessGroup]) -> _Memory:
        memory = self
        for group in groups:
            memory = memory.setdefault(group, _Memory())
        return memory

    def add(self, kind: Hashable) -> None:
        if len(self.kinds) >= _REMEMBERED:
            self.kinds.clear()
        self.kinds.add(kind)


_agreed = _Memory()


def check(
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    key: Callable[[], Hashable],
    describe: Callable[[], str],
) -> None:
    """Raises ValueError on every rank if descriptions differ, or if one rank's ``describe`` raises.

    Arguments:
        groups: one after the other, so that word of an error in one gets to the others'.
        device: of the call's tensors.
        key: equal on a later call only if the description would be; then nothing is sent.
        describe: what the call looks like; the same on every rank of the groups.

    Either may raise for what is wrong on this rank alone.
    """
    memory = _agreed.of(groups)
    kind, wrong = _kind(key)
    if wrong is None and kind in memory.kinds:
        return
    error: Exception | None = None
    try:
        mine = describe()
        if wrong is not None:
            raise wrong
    except Exception as raised:  # whatever it is, the other ranks wait for a word
        error, mine = raised, f"an error: {raised}"
    for group in groups:
        other = _different(group, mine)
        if other and error is None:
            error, mine = ValueError(other), f"an error: {other}"
    if error is not None:
        raise error
    if device.type == "cuda":
        for group in groups:
            # NCCL connects a group in its first transfer, in which all ranks must take part.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    memory.add(kind)


def _kind(key: Callable[[], Hashable]) -> tuple[Hashable, Exception | None]:
    """The key, or what is wrong with a call that has none."""
    try:
        kind = key()
        hash(kind)
    except Exception as raised:
        return None, raised
    return kind, None


def _different(group: dist.ProcessGroup, mine: str) -> str:
    """Which ranks of the group differ, and how; empty if none does."""
    descriptions: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(descriptions, mine, group=group)
    for other, theirs in enumerate(descriptions):
        if theirs != mine:
            here = dist.get_global_rank(group, dist.get_rank(group))
            there = dist.get_global_rank(group, other)
            return f"ranks differ: rank {here} has {mine}; rank {there} has {theirs}"
    return ""
