"""What became slower since an earlier run's JSON."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.rows import Row

# Contenders that are not this library; presets of several of our calls name ours otherwise.
FOREIGN = {
    *("fa2", "fa3", "cudnn", "sdpa", "standard", "torch", "read", "copy", "compiled"),
    *("gla chunk", "gla fused_chunk", "gla fused_recurrent", "mamba2", "simple gla"),
}


def _cost(unit: str, milliseconds: float | None, rate: float | None) -> float | None:
    """What should not grow: memory where that is the rate, else time."""
    return rate if unit == "MB" else milliseconds


def _costs(rows: list[dict]) -> dict[tuple[str, ...], float]:
    found = {}
    for row in rows:
        for name, time in row["milliseconds"].items():
            cost = _cost(row["unit"], time, row["rates"].get(name))
            if cost and name not in FOREIGN:
                key = (row["preset"], row.get("axis", ""), row["problem"], name)
                found[key] = cost
    return found


def regressions(rows: list[Row], old: Path, threshold: float) -> tuple[list[str], int]:
    """A line for each figure that grew by more than ``threshold``, and how many were compared."""
    now = _costs([vars(row) for row in rows])
    before = _costs(json.loads(old.read_text())["rows"])
    both = {key: now[key] / before[key] for key in now if key in before}
    worse = {key: ratio for key, ratio in both.items() if ratio > 1 + threshold}
    lines = [
        f"{preset} {problem} {name}: {before[key]:.4g} → {now[key]:.4g} ({ratio - 1:+.1%})"
        for key, ratio in sorted(worse.items(), key=lambda item: -item[1])
        for preset, _, problem, name in [key]
    ]
    return lines, len(both)
