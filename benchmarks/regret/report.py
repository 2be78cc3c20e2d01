"""Regrets as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path

from benchmarks.regret.measure import Regret


def percentile(numbers: list[float], share: float) -> float:
    ordered = sorted(numbers)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def summary(regrets: list[Regret]) -> str:
    """A line for each direction, and the worst ten with what would have been better."""
    lines = []
    for direction in ("backward", "forward", "cache"):
        of_it = [r for r in regrets if r.problem.direction == direction]
        if not of_it:
            continue
        factors = [r.factor for r in of_it]
        error = [abs(r.predicted[r.best] / r.measured[r.best] - 1) for r in of_it]
        lines.append(
            f"{direction}: {len(factors)} problems, chosen over best: geometric mean "
            f"{statistics.geometric_mean(factors):.4f}, 95th percentile "
            f"{percentile(factors, 0.95):.3f}, most {max(factors):.3f}; predicted within "
            f"{percentile(error, 0.8):.0%} for 80% of them"
        )
        for r in sorted(of_it, key=lambda r: -r.factor)[:10]:
            lines.append(
                f"  {r.factor:.3f}  {r.problem}: {r.choices[r.chosen]} "
                f"({r.measured[r.chosen]:.0f} µs, predicted {r.predicted[r.chosen]:.0f}); best "
                f"{r.choices[r.best]} ({r.measured[r.best]:.0f}, {r.predicted[r.best]:.0f})"
            )
    return "\n".join(lines)


def write(regrets: list[Regret], machine: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(r) | {"factor": round(r.factor, 4)} for r in regrets]
    path.write_text(json.dumps({"machine": machine, "regrets": rows}) + "\n")


def plot(regrets: list[Regret], machine: dict, path: Path) -> None:
    """The regret of each problem over the time that it takes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for direction, marker in (("backward", "o"), ("forward", "s"), ("cache", "^")):
        of_it = [r for r in regrets if r.problem.direction == direction]
        if of_it:
            mean = statistics.geometric_mean([r.factor for r in of_it])
            times = [r.measured[r.best] for r in of_it]
            factors = [r.factor for r in of_it]
            label = f"{direction}: mean {mean:.3f}"
            axes.scatter(times, factors, s=14, marker=marker, alpha=0.7, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("time of the best choice, µs")
    axes.set_ylabel("time of the chosen over the best, lower is better")
    axes.set_title(f"Plans of {len(regrets)} problems, {machine.get('gpu', 'no GPU')}, bf16")
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
