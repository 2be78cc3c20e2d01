"""The time of every choice that a call's plan has."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.regret.calls import make
from benchmarks.regret.problems import Problem
from flash_attn import backend

_FLUSH_BYTES = 256 * 2**20  # more than any L2
_SLOW = 1.35  # times the best, beyond which a choice is not measured further
_LAST = 4  # choices that are measured once more: a minimum of many medians is too small
_SYNCHRONIZE_US = 2000.0  # of queued work, beyond which the host waits


@dataclass
class Regret:
    """Microseconds of each choice, measured and predicted; the others' are rough."""

    problem: Problem
    choices: list[str]
    measured: list[float]
    predicted: list[float]
    chosen: int
    confirmed: list[int]  # choices that were measured more often

    @property
    def best(self) -> int:
        return min(self.confirmed, key=self.measured.__getitem__)

    @property
    def factor(self) -> float:
        return self.measured[self.chosen] / self.measured[self.best]


class Bench:
    """Times choices by turns, in an order of chance: another kernel's code comes before each
    sample, as in a model, and L2 holds nothing of the call."""

    def __init__(self, device: torch.device, seed: int = 0):
        self.device = device
        self.dice = random.Random(seed)
        self.scratch = torch.zeros(2, _FLUSH_BYTES // 4, device=device)
        self.matrix = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16)

    def measure(self, problem: Problem) -> Regret | None:
        """None: the call has no plan to speak of."""
        call = make(problem, self.device)
        plan = self._plan(call)
        if plan is None:
            return None
        choices = [choice["text"] for choice in plan["choices"]]
        everything = list(range(len(choices)))
        try:
            for index in everything:
                self._force(index)
                call()
            rough = self._rounds(call, everything, 2)
            least = min(map(min, rough.values()))
            close = [i for i in everything if min(rough[i]) < _SLOW * least or i == plan["chosen"]]
            samples = self._rounds(call, close, 7)
            medians = {i: statistics.median(samples[i]) for i in close}
            last = sorted({plan["chosen"], *sorted(close, key=medians.__getitem__)[:_LAST]})
            final = self._rounds(call, last, 15)
        finally:
            self._force(-1)
        measured = [medians.get(i, min(rough[i])) for i in everything]
        for i in last:
            measured[i] = statistics.median(final[i])
        predicted = [choice["us"] for choice in plan["choices"]]
        return Regret(problem, choices, measured, predicted, plan["chosen"], last)

    def _plan(self, call: Callable[[], object]) -> dict | None:
        backend.library.record_plans(True)
        call()
        text = backend.library.record_plans(False)
        return json.loads(text) if text else None

    def _force(self, index: int) -> None:
        backend.library.force_choice(index)

    def _rounds(
        self, call: Callable[[], object], choices: list[int], rounds: int
    ) -> dict[int, list[float]]:
        """Microseconds, of samples that the host was ahead of, if there are any."""
        samples: dict[int, list[tuple]] = {i: [] for i in choices}
        order = list(choices)
        for _ in range(rounds):
            self.dice.shuffle(order)
            for index in order:
                samples[index].append(self._sample(call, index))
            torch.cuda.synchronize(self.device)
        times = {}
        for index, taken in samples.items():
            ahead = [sample for sample in taken if not sample[2]] or taken
            times[index] = [1e3 * begin.elapsed_time(end) for begin, end, _ in ahead]
        return times

    def _sample(self, call: Callable[[], object], index: int) -> tuple:
        self._force(index)
        torch.mm(self.matrix, self.matrix)
        self.scratch[0].zero_()
        self.scratch[1].sum()  # what was written is written back before the call begins
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        return begin, end, begin.query()
