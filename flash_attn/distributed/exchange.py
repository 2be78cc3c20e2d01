"""Tensors between pairs of ranks while kernels run.

Transfers are posted before the kernels that they run beside. On a GPU a process group's transfers
run on a stream of its own, which waits for what was launched before they were posted and for
nothing after that; waiting for them makes the current stream wait, not the host. What is posted
together is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Clocks, some 10 us, that the current stream waits behind what was posted. An attention kernel has
# a block for each SM that stays to the kernel's end: if it is the first to start, in a
# race of two streams that wait for the same event, transfers begin when it is done.
HEAD_START = 20_000


class Transfer:
    """What is under way to and from other ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        sent: Sequence[Tensor],
        to: int,
        received: Sequence[Tensor],
        source: int,
    ):
        """``to`` and ``source`` are ranks of the group; empty tensors do not travel."""
        self._sent = [x.contiguous() for x in sent if x.numel()]  # held until they have left
        self._received = received
        self._works = []
        default = group if group is not None else dist.group.WORLD
        post = [
            dist.P2POp(dist.isend, x, dist.get_global_rank(default, to), group) for x in self._sent
        ] + [
            dist.P2POp(dist.irecv, x, dist.get_global_rank(default, source), group)
            for x in received
            if x.numel()
        ]
        if post:
            self._works = dist.batch_isend_irecv(post)
            if post[0].tensor.is_cuda:
                torch.cuda._sleep(HEAD_START)

    def wait(self) -> Sequence[Tensor]:
        """What was received."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return self._received
