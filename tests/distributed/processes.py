"""Processes that stay: starting one costs seconds, a case in it milliseconds."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
TIMEOUT = 60.0  # seconds: of torch.distributed's waits, and what a case may take
GRACE = 10.0  # seconds for all of them to end


def group(ranks: int) -> dist.ProcessGroup:
    """The first so many ranks."""
    return _groups[ranks]


_groups: dict[int, dist.ProcessGroup] = {}


def _serve(rank: int, store: str, pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{store}", rank=rank, world_size=WORLD,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    if rank < torch.cuda.device_count():
        torch.cuda.set_device(rank)
    for ranks in range(1, WORLD):
        _groups[ranks] = dist.new_group(list(range(ranks)))
    _groups[WORLD] = dist.group.WORLD
    pipe.send(None)
    while (work := pipe.recv()) is not None:
        function, args = work
        try:
            pipe.send((True, function(rank, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def error_of(kinds: type | tuple, function: Callable, *args: Any, **kwargs: Any) -> str:
    """What the call's error says, which is of these kinds: a rank returns it."""
    try:
        function(*args, **kwargs)
    except kinds as error:
        return str(error)
    return "nothing raised"


class Processes:
    """``run`` calls a function on the first so many ranks; a hang ends all of them."""

    def __init__(self):
        self._processes: list = []

    def run(self, function: Callable, *args: Any, ranks: int = WORLD) -> list[Any]:
        """What ``function(rank, *args)`` returned on each rank; of a module, and picklable."""
        if not self._processes:
            self._start()
        for pipe in self._pipes[:ranks]:
            pipe.send((function, args))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(TIMEOUT):
                self.stop()
                raise TimeoutError(f"rank {rank} did not answer; others: {errors}")
            fine, result = pipe.recv()
            (results if fine else errors).append(result)
        if errors:
            raise RuntimeError("\n".join(errors))
        return results

    def _start(self) -> None:
        # Torch is imported once, and the processes start from there.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.work"])
        store = os.path.join(tempfile.mkdtemp(), "store")
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))
        for pipe in self._pipes:
            pipe.recv()

    @property
    def _pipes(self) -> list:
        return [pipe for _, pipe in self._processes]

    def stop(self) -> None:
        """Lets them end, and kills what does not: one that ends writes what coverage counted."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # that one is gone
                pipe.send(None)
        deadline = time.monotonic() + GRACE
        for process, pipe in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            pipe.close()
        self._processes = []
