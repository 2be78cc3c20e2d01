"""Fits the numbers of a machine to measured choices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.regret.measure import Regret
from benchmarks.tune.model import Model, can_be_predicted

_SOFT = 0.03  # choices that are predicted as near as this share the expectation
_ERRORS = 0.04  # weight of the errors of times, beside the regret
_NEAR = 1.35  # times the best: choices whose times count
_FEW = 6  # problems, below which a kernel's times are left as they are
# Factors of the number that the fit begins with, and bounds that are physical.
_FACTORS = {"step": (0.33, 3), "sm_reads": (0.5, 2), "memory": (0.85, 1.15), "reads": (0.85, 1.15)}
_BOUNDS = {"begin": (0.5, 12), "launch": (1, 10), "l2_gain": (1.2, 3), "l2_share": (0.7, 1.6)}


class Data:
    """Measured problems as flat arrays, a choice after the other."""

    def __init__(self, model: Model, regrets: Sequence[Regret]):
        self.model = model
        self.problems = []
        us, best = [], []
        for regret in filter(lambda r: can_be_predicted(r.problem), regrets):
            texts = model.add(regret.problem)
            times = dict(zip(regret.choices, regret.measured))  # alike ones are the same choice
            of_it = [times.get(text, np.nan) for text in texts]
            self.problems.append(regret.problem if np.isfinite(of_it).sum() > 0 else None)
            us.append(of_it)
            listed = [regret.measured[i] for i in regret.confirmed if regret.choices[i] in texts]
            best.append(min(listed, default=np.nan))
        self.us = np.array([time for of_it in us for time in of_it])
        self.counts = np.array([len(of_it) for of_it in us])
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.best = np.array(best)
        self.all = self.part(np.flatnonzero(np.isfinite(self.best)))

    def part(self, which: np.ndarray) -> Part:
        return Part(self, which.astype(np.int32))


class Part:
    """Some of the problems."""

    def __init__(self, data: Data, which: np.ndarray):
        self.model, self.which = data.model, which
        self.problems = [data.problems[i] for i in which]
        counts = data.counts[which]
        flat = [np.arange(data.starts[i], data.starts[i + 1]) for i in which]
        self.us = data.us[np.concatenate(flat)] if len(which) else np.empty(0)
        self.of = np.repeat(np.arange(len(which)), counts)
        self.starts = np.concatenate([[0], np.cumsum(counts)])[:-1]
        self.over = self.us / data.best[which][self.of]
        self.near = np.isfinite(self.over) & (self.over < _NEAR)

    def losses(self) -> tuple[np.ndarray, np.ndarray]:
        """For each problem, the expected regret of a soft choice and the mean square of the errors
        of near-best choices, both of logarithms."""
        us, _ = self.model.predict(self.which, len(self.us))
        log = np.log(np.where(np.isfinite(self.us), us, np.inf))
        least = np.minimum.reduceat(log, self.starts)
        weights = np.exp(-(log - least[self.of]) / _SOFT)
        regret = np.where(weights > 0, np.log(np.maximum(self.over, 1)), 0)
        soft = np.add.reduceat(weights * regret, self.starts)
        soft /= np.add.reduceat(weights, self.starts)
        errors = np.where(self.near, (np.log(us) - np.log(self.us)) ** 2, 0)
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
        best = [self.starts[i] + np.nanargmin(self.over[self.of == i]) for i in range(len(self.which))]
        return us[best] / self.us[best]


def bounds_of(name: str, start: float, rates: dict[str, float]) -> tuple[float, float]:
    kind = name.split("/")[-1]
    if kind in _BOUNDS:
        low, high = _BOUNDS[kind]
        return min(low, start), max(high, start)
    low, high = _FACTORS.get(kind, (1, 1))
    middle = rates.get(name, start)
    return low * middle, high * middle


class Fit:
    """Changes one number, or all numbers of a kind, as long as that lessens the loss."""

    def __init__(self, part: Part, data: Data, rates: dict[str, float]):
        self.part, self.model = part, part.model
        self.numbers = self.model.numbers
        self.bounds = {n: bounds_of(n, x, rates) for n, x in self.numbers.items()}
        self._set({n: float(np.clip(x, *self.bounds[n])) for n, x in self.numbers.items()})
        self.groups = self._groups(data)
        self.soft, self.errors = part.losses()

    def _set(self, numbers: dict[str, float]) -> None:
        self.model.numbers = self.numbers = numbers

    def _groups(self, data: Data) -> list[tuple[list[str], Part, np.ndarray]]:
        """(numbers that change together, problems whose prediction they change, where these are)"""
        before, _ = self.model.predict(self.part.which, len(self.part.us))
        names, together = list(self.numbers), {"step": [], "begin": []}
        groups = []
        for name in names:
            self.model.numbers = self.numbers | {name: 1.1 * self.numbers[name]}
            after, _ = self.model.predict(self.part.which, len(self.part.us))
            where = np.unique(self.part.of[before != after])
            if len(where) >= _FEW:
                groups.append(([name], data.part(self.part.which[where]), where))
                together.get(name.split("/")[-1], []).append(name)
        everywhere = np.arange(len(self.part.which))
        self._set(self.numbers)
        return [(g, self.part, everywhere) for g in together.values() if g] + groups

    def loss(self, soft: np.ndarray, errors: np.ndarray, regret: bool) -> float:
        of_times = float(np.sqrt(np.minimum(errors, 0.25).mean()))
        return float(soft.mean()) + _ERRORS * of_times if regret else of_times

    def run(self, seconds: float, progress: Callable[[str], None]) -> None:
        """A quarter of the time for the errors of times, the rest for the regret."""
        begin = time.monotonic()
        for regret, end in ((False, 0.25 * seconds), (True, seconds)):
            widths = [0.1] * len(self.groups)
            while time.monotonic() < begin + end and max(widths) > 0.004:
                for i, (names, part, where) in enumerate(self.groups):
                    better = any(
                        self._try(names, sign * widths[i], part, where, regret) for sign in (1, -1)
                    )
                    widths[i] = min(1.3 * widths[i], 0.3) if better else 0.6 * widths[i]
                    if time.monotonic() > begin + end:
                        break
                loss = self.loss(self.soft, self.errors, regret)
                progress(f"{'regret' if regret else 'times'}: loss {loss:.5f}")

    def _try(self, names: list[str], by: float, part: Part, where: np.ndarray, regret: bool) -> bool:
        changed = {n: float(np.clip(self.numbers[n] * np.exp(by), *self.bounds[n])) for n in names}
        self.model.numbers = self.numbers | changed
        soft, errors = self.soft.copy(), self.errors.copy()
        soft[where], errors[where] = part.losses()
        now, then = self.loss(soft, errors, regret), self.loss(self.soft, self.errors, regret)
        if now < then - 1e-6:
            self._set(self.numbers | changed)
            self.soft, self.errors = soft, errors
            return True
        self.model.numbers = self.numbers
        return False
