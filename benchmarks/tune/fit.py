"""Fits the numbers of a machine to measured choices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.regret.measure import Regret
from benchmarks.regret.problems import Problem
from benchmarks.tune.model import Model, can_be_predicted

_SOFT = 0.03  # choices that are predicted as near as this share the expectation
_ERRORS = 0.1  # weight of the errors of times, beside the regret
_PRIOR = 0.03  # weight of numbers' changes, beside the sum of the problems' regrets
# Changes, as logarithms beside the median change of a schedule's or tile's numbers, that count 1.
_USUAL = {"fixed": 0.3, "step": 0.06}
_NEAR = 1.35  # times the best: choices whose times count
_FEW = 6  # problems, below which a number changes with those of its schedule or tile alone
# Factors of the number that the fit begins with, and bounds that are physical.
_FACTORS = {
    "step": (0.33, 3),
    "sm_reads": (0.5, 2),
    "code_reads": (0.5, 2),
    "memory": (0.85, 1.15),
    "reads": (0.85, 1.15),
}
_BOUNDS = {"fixed": (0.5, 12), "launch": (1, 10), "l2_factor": (0.7, 1.6)}


class Data:
    """Measured problems as flat arrays, a choice after the other; NaN: it was not measured."""

    def __init__(self, model: Model, regrets: Sequence[Regret]):
        self.model = model
        kept = [regret for regret in regrets if can_be_predicted(regret.problem)]
        self.problems = [regret.problem for regret in kept]
        us, best = [], []
        for regret in kept:
            texts = model.add(regret.problem)
            times = dict(zip(regret.choices, regret.measured))  # alike ones are the same choice
            us.append([times.get(text, np.nan) for text in texts])
            listed = [regret.measured[i] for i in regret.confirmed if regret.choices[i] in texts]
            best.append(min(listed, default=np.nan))
        self.us = np.concatenate(us) if us else np.empty(0)
        self.starts = np.cumsum([0, *map(len, us)])
        self.best = np.array(best)

    def halves(self) -> tuple[Part, Part]:
        """Every other problem that was measured."""
        measured = np.flatnonzero(np.isfinite(self.best))
        return self.part(measured[::2]), self.part(measured[1::2])

    def part(self, which: np.ndarray) -> Part:
        return Part(self, which.astype(np.int32))


def _knows_lengths(p: Problem) -> bool:
    """Whether the plan is made for the lengths that were measured."""
    return p.direction != "cache" or (p.batch == 1 and p.keys[0] == p.seqlen_k)


class Part:
    """Some of the problems."""

    def __init__(self, data: Data, which: np.ndarray):
        self.model, self.which = data.model, which
        self.problems = [data.problems[i] for i in which]
        counts = np.diff(data.starts)[which]
        self.us = np.concatenate([data.us[data.starts[i] : data.starts[i + 1]] for i in which])
        self.of = np.repeat(np.arange(len(which)), counts)
        self.starts = np.concatenate([[0], np.cumsum(counts)])[:-1]
        self.over = self.us / data.best[which][self.of]
        self.known = np.array([_knows_lengths(p) for p in self.problems], dtype=bool)
        self.near = np.isfinite(self.over) & (self.over < _NEAR) & self.known[self.of]

    def losses(self) -> tuple[np.ndarray, np.ndarray]:
        """For each problem, the expected regret of a soft choice and the mean error of near-best
        choices, both of logarithms."""
        us, _ = self.model.predict(self.which, len(self.us))
        log = np.log(np.where(np.isfinite(self.us), us, np.inf))
        least = np.minimum.reduceat(log, self.starts)
        weights = np.exp(-(log - least[self.of]) / _SOFT)
        regret = np.where(weights > 0, np.log(np.maximum(self.over, 1)), 0)
        soft = np.add.reduceat(weights * regret, self.starts)
        soft /= np.add.reduceat(weights, self.starts)
        errors = np.where(self.near, np.abs(np.log(us) - np.log(self.us)), 0)
        near = np.add.reduceat(self.near.astype(float), self.starts)
        return soft, np.add.reduceat(errors, self.starts) / np.maximum(near, 1)

    def regret_of_plans(self) -> np.ndarray:
        """Chosen over best; NaN where the chosen was not measured."""
        _, planned = self.model.predict(self.which, len(self.us))
        chosen = np.full(len(self.which), np.nan)
        for i in np.flatnonzero(planned)[::-1]:
            chosen[self.of[i]] = self.over[i]
        return chosen

    def error_of_best(self) -> np.ndarray:
        """Predicted over measured, of the best choice."""
        us, _ = self.model.predict(self.which, len(self.us))
        best = [
            self.starts[i] + np.nanargmin(self.over[self.of == i]) for i in range(len(self.which))
        ]
        return us[best] / self.us[best]


def bounds_of(name: str, start: float, rates: dict[str, float]) -> tuple[float, float]:
    """Bounds of a number that begins with `start`. 0, a kernel that is not there, stays 0."""
    kind = name.split("/")[-1]
    if kind in _BOUNDS and start > 0:
        low, high = _BOUNDS[kind]
        return min(low, start), max(high, start)
    low, high = _FACTORS.get(kind, (1, 1))
    middle = rates.get(name, start)
    return low * middle, high * middle


class Fit:
    """Changes one number, or all steps or fixed times, of a schedule or tile or of all, by a
    factor, as long as that lessens the loss."""

    def __init__(self, part: Part, data: Data, rates: dict[str, float]):
        self.part, self.model, self.start = part, part.model, part.model.numbers
        names = self.model.names
        self.low, self.high = np.array(
            [bounds_of(name, x, rates) for name, x in zip(names, self.start)]
        ).T
        self.kinds = np.array([name.split("/")[-1] for name in names])
        self.usual = np.array([_USUAL.get(kind, 0.2) for kind in self.kinds])
        # The same number of all head dims: "ordered_dq/step".
        ends = np.array(["/".join(name.split("/")[-2:]) if "/" in name else "" for name in names])
        self.alike = [np.flatnonzero(ends == end) for end in sorted(set(ends) - {""})]
        self.model.numbers = self.numbers = np.clip(self.start, self.low, self.high)
        self.groups = self._groups(data)
        self.soft, self.errors = part.losses()

    def _groups(self, data: Data) -> list[tuple[np.ndarray, Part, np.ndarray]]:
        """(numbers that change together, problems whose prediction they change, where these are)"""
        before, _ = self.model.predict(self.part.which, len(self.part.us))
        everywhere = np.arange(len(self.part.which))
        together = [*(np.flatnonzero(self.kinds == kind) for kind in _USUAL), *self.alike]
        groups = [(numbers, self.part, everywhere) for numbers in together]
        for number in range(len(self.numbers)):
            changed = self.numbers.copy()
            changed[number] *= 1.1
            self.model.numbers = changed
            after, _ = self.model.predict(self.part.which, len(self.part.us))
            where = np.unique(self.part.of[before != after])
            if len(where) >= _FEW:
                groups.append((np.array([number]), data.part(self.part.which[where]), where))
        self.model.numbers = self.numbers
        return groups

    def loss(
        self, soft: np.ndarray, errors: np.ndarray, numbers: np.ndarray, regret: bool
    ) -> float:
        losses = _ERRORS * np.minimum(errors, 0.5) + (soft if regret else 0)
        changes = np.log(np.where(self.start > 0, numbers / np.maximum(self.start, 1e-9), 1))
        # A schedule may differ as a whole, and then counts once.
        medians = np.array([np.median(changes[numbers]) for numbers in self.alike])
        for numbers, median in zip(self.alike, medians):
            changes[numbers] -= median
        of = np.array([self.kinds[numbers[0]] for numbers in self.alike])
        for kind in _USUAL:
            medians[of == kind] -= np.median(medians[of == kind])
        usual = [*self.usual, *(_USUAL[kind] for kind in of)]
        # Small changes count by their squares. Large ones count by their size, because a kernel may
        # well be much faster or slower on another GPU.
        unusual = np.sqrt(1 + np.square(np.concatenate([changes, medians]) / usual)) - 1
        return float(losses.sum() + _PRIOR * 2 * unusual.sum()) / len(losses)

    def run(self, seconds: float, progress: Callable[[str], None]) -> None:
        """At most a quarter of the time for the errors of times alone, the rest with the regret."""
        begin = time.monotonic()
        for regret, share in ((False, 0.25), (True, 1)):
            self.best = self.loss(self.soft, self.errors, self.numbers, regret)
            widths = np.full(len(self.groups), 0.1)
            while time.monotonic() < begin + share * seconds and widths.max() > 0.004:
                for i, group in enumerate(self.groups):
                    better = any(self._try(*group, sign * widths[i], regret) for sign in (1, -1))
                    widths[i] = min(1.3 * widths[i], 0.3) if better else 0.6 * widths[i]
                progress(
                    f"fit of {'regret and times' if regret else 'times'}: loss {self.best:.5f}"
                )

    def _try(
        self, which: np.ndarray, part: Part, where: np.ndarray, by: float, regret: bool
    ) -> bool:
        changed = self.numbers.copy()
        changed[which] = np.clip(changed[which] * np.exp(by), self.low[which], self.high[which])
        self.model.numbers = changed
        soft, errors = self.soft.copy(), self.errors.copy()
        soft[where], errors[where] = part.losses()
        loss = self.loss(soft, errors, changed, regret)
        better = loss < self.best - 1e-6
        if better:
            self.numbers, self.soft, self.errors, self.best = changed, soft, errors, loss
        self.model.numbers = self.numbers
        return better
