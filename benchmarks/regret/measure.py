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
_AHEAD_CYCLES = 500_000  # that the GPU is kept busy, while the host launches the call


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


@dataclass
class _Choice:
    text: str
    us: float  # predicted
    force: tuple[int, int]  # as of flash_attn._C.force_choice


_PLANNED = (-1, -1)


def _listed(plan: dict, decode: int) -> list[_Choice]:
    """A forward's or a backward's choices, with what is forced of decoding."""
    return [_Choice(c["text"], c["us"], (i, decode)) for i, c in enumerate(plan["choices"])]


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
        try:
            choices, chosen = self._choices(call)
            if not choices:
                return None
            everything = list(range(len(choices)))
            self._forces = [choice.force for choice in choices]
            for index in everything:
                self._force(index)
                call()
            rough = self._rounds(call, everything, 2)
            least = min(map(min, rough.values()))
            close = [i for i in everything if min(rough[i]) < _SLOW * least or i == chosen]
            samples = self._rounds(call, close, 7)
            medians = {i: statistics.median(samples[i]) for i in close}
            last = sorted({chosen, *sorted(close, key=medians.__getitem__)[:_LAST]})
            final = self._rounds(call, last, 15)
        finally:
            backend.library.force_choice(*_PLANNED)
        measured = [medians.get(i, min(rough[i])) for i in everything]
        for i in last:
            measured[i] = statistics.median(final[i])
        predicted = [choice.us for choice in choices]
        return Regret(problem, [c.text for c in choices], measured, predicted, chosen, last)

    def _choices(self, call: Callable[[], object]) -> tuple[list[_Choice], int]:
        """All that the call can be served by, and which is planned. Of a batch that two kernels
        share, each one's choices beside what is planned for the other."""
        planned = self._plans(call)
        decode, plan = planned["decode"], planned["plan"]
        if decode is None:
            return (_listed(plan, -1), plan["chosen"]) if plan else ([], -1)
        choices = [_Choice(c["text"], c["us"], (-1, i)) for i, c in enumerate(decode["choices"])]
        if decode["chosen"] < 0:
            return choices + _listed(plan, -2), len(choices) + plan["chosen"]
        beside = -1
        if plan is None:
            beside = -2
            backend.library.force_choice(-1, beside)
            plan = self._plans(call)["plan"]
            backend.library.force_choice(*_PLANNED)
        others = _listed(plan, beside) if plan else []  # only decode may read its codes
        return choices + others, decode["chosen"]

    def _plans(self, call: Callable[[], object]) -> dict:
        backend.library.record_plans(True)
        call()
        return json.loads(backend.library.record_plans(False))

    def _force(self, index: int) -> None:
        backend.library.force_choice(*self._forces[index])

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
        torch.cuda._sleep(_AHEAD_CYCLES)
        torch.mm(self.matrix, self.matrix)
        self.scratch[0].zero_()
        self.scratch[1].sum()  # what was written is written back before the call begins
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        return begin, end, begin.query()
