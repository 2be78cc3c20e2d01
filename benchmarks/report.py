"""Rows as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path

from benchmarks.presets import Row

COLORS = {
    "ours": "#1f6feb",
    "sdpa": "#d1603d",
    "fa2": "#d1603d",
    "fa3": "#6e40c9",
    "cudnn": "#2da44e",
    "standard": "#9aa4b2",
    "torch": "#57606a",
}


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _kind(row: Row) -> str:
    """The preset, and the kind of call where that says more."""
    call = row.problem.split()[0]
    return row.preset if call == row.preset else f"{row.preset}: {call}"


def table_line(row: Row) -> str:
    """The problem, each contender's rate and time, and our time over the best other's."""
    cells = [
        f"{name} {_number(row.rates[name]):>6} ({_number(milliseconds)} ms)"
        if milliseconds
        else f"{name}      -"
        for name, milliseconds in row.milliseconds.items()
    ]
    ratio = f"  time ratio {row.ratio:.2f}" if row.ratio else ""
    return f"{row.problem:<44} {row.unit:<8} " + "   ".join(cells) + ratio


def summary(rows: list[Row]) -> str:
    """The mean ratio per preset and kind of call; "" where nobody could be compared."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.ratio:
            groups.setdefault(_kind(row), []).append(row.ratio)
    return "\n".join(
        f"{name:<16} our time / fastest other: geometric mean "
        f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}, worst {max(ratios):.2f}"
        for name, ratios in groups.items()
    )


def write_json(path: Path, rows: list[Row], machine: dict) -> None:
    records = [asdict(row) | {"ratio": row.ratio} for row in rows]
    path.write_text(json.dumps({"machine": machine, "rows": records}, indent=1) + "\n")


def plot(path: Path, rows: list[Row], title: str) -> None:
    """Horizontal bars, one group per problem, one panel per preset and kind of call."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(_kind(row), []).append(row)
    tallest = max(map(len, panels.values()))
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(6.2 * len(panels), 1.6 + 0.42 * tallest),
        squeeze=False,
        constrained_layout=True,
    )
    for axis, (name, group) in zip(axes[0], panels.items()):
        _bars(axis, name, group)
    figure.suptitle(title, x=0.008, ha="left", fontsize=9.5, color="#57606a")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(axis, name: str, rows: list[Row]) -> None:
    contenders = list(dict.fromkeys(key for row in rows for key in row.rates))
    thickness = 0.8 / len(contenders)
    for i, contender in enumerate(contenders):
        places = [n + i * thickness for n in range(len(rows))]
        rates = [row.rates.get(contender) or 0 for row in rows]
        axis.barh(places, rates, thickness, label=contender, color=COLORS.get(contender))
    middle = 0.4 - thickness / 2
    labels = [row.problem.split(maxsplit=1)[1] for row in rows]
    axis.set_yticks([n + middle for n in range(len(rows))], labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_title(f"{name}, {rows[0].unit}", loc="left", fontweight="bold", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", color="#e8ebef")
    axis.set_axisbelow(True)
    axis.margins(y=0.01)
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(contenders)}
    axis.legend(frameon=False, fontsize=8, **above)
