"""Fair timing: contenders take turns, so that clock and power drift hit all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

# Twice the 50 MiB L2 of an H100, and then some.
_FLUSH_BYTES = 256 * 2**20
# A contender that tunes itself has done so in its first calls: what takes longer may stop there.
_WARM_UP_SECONDS = 1.0


def _settle_allocator() -> None:
    """Bring malloc into the state it has in a program that has once freed a large tensor.

    glibc hands freed memory back to the kernel, and zeroes it anew at each allocation, until it has
    seen a block of nearly 32 MiB freed. Before that every contender's time is mostly page faults.
    """
    torch.ones(31 * 2**20, dtype=torch.uint8)


class Clock:
    """Median milliseconds of callables on one device.

    Before each sample the L2 cache of a GPU is flushed by writes, which then wait there to be
    written back while a contender reads: 8 µs of one that reads 256 MiB (H200). ``clean``: it is
    flushed by reads after that, so that contenders find it cold and owe it nothing.
    """

    def __init__(self, device: torch.device, clean: bool = False):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.clean = clean
        self.missing: dict[str, str] = {}
        self._scratch = None
        if not self.on_gpu:
            _settle_allocator()

    def measure(
        self,
        contenders: dict[str, Callable],
        budget_ms: float = 60.0,
        min_samples: int = 7,
        max_samples: int = 60,
        warm_ups: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[str, float | None]:
        """Time ``contenders`` round-robin; None for one that raises in its warm-up, which
        ``missing`` has the reason of. warm_ups: calls before the first sample, 2 by default."""
        self.missing = {}
        live = {
            name: fn
            for name, fn in contenders.items()
            if self._warm_up(name, fn, warm_ups.get(name, 2))
        }
        medians: dict[str, float | None] = dict.fromkeys(contenders)
        if not live:
            return medians
        slowest = max(self._milliseconds(self._sample(fn)) for fn in live.values())
        rounds = int(max(min_samples, min(max_samples, budget_ms / max(1e-3, slowest))))
        samples = {name: [] for name in live}
        for _ in range(rounds):
            for name, fn in live.items():
                samples[name].append(self._sample(fn))
        return medians | {name: self._median(taken) for name, taken in samples.items()}

    def _median(self, samples: list[tuple]) -> float:
        """The median of the samples in which the GPU did not wait for the host, or else of all."""
        undisturbed = [sample for sample in samples if not sample[2]]
        return statistics.median(map(self._milliseconds, undisturbed or samples))

    def _warm_up(self, name: str, fn: Callable, calls: int) -> bool:
        end = time.perf_counter() + _WARM_UP_SECONDS
        try:
            for call in range(calls):
                fn()
                self.synchronize()
                if call > 0 and time.perf_counter() > end:
                    break
        except Exception as error:  # a contender that does not do this point is shown as "-"
            self.missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self.synchronize()
            return False
        return True

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _sample(self, fn: Callable) -> tuple:
        """The start, the end, and whether the GPU waited for the host between them.

        Start and end are seconds, or events that may not have happened yet.
        """
        if not self.on_gpu:
            start = time.perf_counter()
            fn()
            return start, time.perf_counter(), False
        if self._scratch is None:
            shape = (2, _FLUSH_BYTES // 4)
            self._scratch = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._scratch[0].zero_()  # what the previous contender left in L2 helps no other
        if self.clean:
            self._scratch[1].sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        # No wait here: the host runs ahead during the flush, so its overhead is not in the sample,
        # unless something held it up until the flush was over.
        return begin, end, begin.query()

    def _milliseconds(self, sample: tuple) -> float:
        begin, end, _ = sample
        if not self.on_gpu:
            return 1e3 * (end - begin)
        end.synchronize()
        return begin.elapsed_time(end)


def graphed(fn: Callable) -> Callable:
    """``fn`` replayed from a CUDA graph: the GPU's time without the host's."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay
