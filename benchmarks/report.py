"""Rows as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path

from benchmarks.rows import Row

COLORS = {
    "ours": "#1f6feb",
    "sdpa": "#d1603d",
    "fa2": "#d1603d",
    "efficient": "#d1603d",
    "flashmla": "#d1603d",
    "fa3": "#6e40c9",
    "cudnn": "#2da44e",
    "standard": "#9aa4b2",
    "copy": "#9aa4b2",
    "read": "#9aa4b2",
    "our simple gla": "#54aeff",
    "our gla": "#0a3069",
    "gla chunk": "#d1603d",
    "gla fused_chunk": "#bf8700",
    "gla fused_recurrent": "#cf222e",
    "mamba2": "#2da44e",
    "simple gla": "#2da44e",
    "torch": "#57606a",
    "fp8": "#1f6feb",
    "bf16": "#9aa4b2",
}
NAMES = {  # in pictures
    "ours": "this library",
    "fa3": "FA3",
    "cudnn": "cuDNN",
    "fa2": "FA2 (torch)",
    "sdpa": "torch's SDPA",
    "efficient": "memory-efficient (torch)",
    "flashmla": "FlashMLA",
    "read": "torch's sum of as many bytes",
    "standard": "softmax(QKᵀ)V",
    "our simple gla": "simple GLA, this library",
    "our gla": "GLA, this library",
    "gla chunk": "GLA, chunk",
    "gla fused_chunk": "GLA, fused_chunk",
    "gla fused_recurrent": "GLA, fused_recurrent",
    "mamba2": "Mamba 2",
    "fp8": "this library, fp8 products",
    "bf16": "this library, bf16",
}
AXES = {"head_dim": "columns of a head (head_dim)", "seqlen": "sequence length, tokens"}
MUTED = {"ha": "left", "fontsize": 9.5, "color": "#57606a"}


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


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
    """The mean ratio per preset and kind of call; "" where there was none to compare."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.ratio:
            groups.setdefault(row.kind, []).append(row.ratio)
    return "\n".join(
        f"{name:<16} our time / fastest other: geometric mean "
        f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}, worst {max(ratios):.2f}"
        for name, ratios in groups.items()
    )


def missing(rows: list[Row]) -> str:
    """A sentence for every reason that a contender had."""
    problems: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.missing.items():
            problems.setdefault((name, reason), []).append(row.problem)
    return "\n".join(
        f"{name} cannot do {of[0]}" + (f" and {len(of) - 1} more" if of[1:] else "") + f": {reason}"
        for (name, reason), of in problems.items()
    )


def write_json(path: Path, rows: list[Row], machine: dict, notes: list[str]) -> None:
    """notes: what else was found, in sentences."""
    records = [asdict(row) | {"ratio": row.ratio} for row in rows]
    found = {"machine": machine, "notes": notes, "rows": records}
    path.write_text(json.dumps(found, indent=1) + "\n")


def read_json(path: Path) -> tuple[list[Row], dict]:
    """The rows, and the machine."""
    found = json.loads(path.read_text())
    fields = Row.__dataclass_fields__
    rows = [Row(**{k: v for k, v in row.items() if k in fields}) for row in found["rows"]]
    return rows, found["machine"]


def plot(path: Path, rows: list[Row], title: str) -> None:
    """One panel per preset and kind of call: curves of a sweep, else horizontal bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.kind, []).append(row)
    tallest = max(8 if group[0].axis else len(group) for group in panels.values())
    columns = 2 if len(panels) > 3 else len(panels)
    lines = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(6.2 * columns, (1.9 + 0.42 * tallest) * lines),
        squeeze=False,
        constrained_layout=True,
    )
    for axis, (name, group) in zip(axes.flat, panels.items()):
        (_curves if group[0].axis else _bars)(axis, group)
        _dress(axis, name)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    if not all(row.axis for row in rows):
        title += "\nd: head_dim, b: batch, s: sequence length, h: heads of q/heads of k and v"
    figure.suptitle(title, x=0.008, **MUTED)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def goal(unit: str) -> str:
    """A unit, and where the better figures are."""
    name = {"Mtok/s": "million tokens/s"}.get(unit, unit)
    return f"{name} ({'lower' if unit == 'MB' else 'higher'} is better)"


def _dress(axis, name: str) -> None:
    """A title, and a line of its own below it for the legend, where no point can be."""
    axis.set_title(name, loc="left", fontweight="bold", fontsize=11, pad=22)
    axis.spines[["top", "right"]].set_visible(False)
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
    contenders = len(axis.get_legend_handles_labels()[0])
    axis.legend(frameon=False, fontsize=8, ncols=contenders, columnspacing=1.2, **above)


def _curves(axis, rows: list[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for contender in dict.fromkeys(key for row in rows for key in row.rates):
        points = [(row.x, rate) for row in rows if (rate := row.rates.get(contender))]
        if points:
            style = {"marker": "o", "markersize": 3, "color": COLORS.get(contender)}
            axis.plot(*zip(*points), label=NAMES.get(contender, contender), **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    places = sorted({row.x for row in rows})
    labels = [f"{x / 1024:g}k" if x >= 1024 else f"{x:g}" for x in places]
    axis.set_xticks(places, labels, fontsize=8)
    axis.set_xticks([], minor=True)
    axis.set_xlabel(AXES.get(rows[0].axis, rows[0].axis))
    axis.set_ylabel(goal(rows[0].unit))
    axis.grid(color="#e8ebef")


def _bars(axis, rows: list[Row]) -> None:
    contenders = list(dict.fromkeys(key for row in rows for key in row.rates))
    thickness = 0.8 / len(contenders)
    for i, contender in enumerate(contenders):
        places = [n + i * thickness for n in range(len(rows))]
        rates = [row.rates.get(contender) or 0 for row in rows]
        style = {"label": NAMES.get(contender, contender), "color": COLORS.get(contender)}
        axis.barh(places, rates, thickness, **style)
    middle = 0.4 - thickness / 2
    labels = [row.problem.split(maxsplit=1)[1] for row in rows]
    axis.set_yticks([n + middle for n in range(len(rows))], labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(goal(rows[0].unit))
    axis.grid(axis="x", color="#e8ebef")
    axis.set_axisbelow(True)
    axis.margins(y=0.01)
