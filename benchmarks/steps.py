"""An engine's steps (preset `serve`) beside FA3, as a picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.report import COLORS, MUTED

STEP = re.compile(r"graph (.*), page (\d+)$")

# step -> page size -> contender -> milliseconds
Steps = dict[str, dict[int, dict[str, float]]]


def read(path: Path) -> Steps:
    steps: Steps = {}
    for row in json.loads(path.read_text())["rows"]:
        if match := STEP.match(row["problem"]):
            steps.setdefault(match[1], {})[int(match[2])] = row["milliseconds"]
    return steps


def draw(steps: Steps, path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.3 * len(steps)), constrained_layout=True)
    pages = sorted({page for of_page in steps.values() for page in of_page})
    marks = dict(zip(pages, ("o", "D", "s")))
    for page in pages:
        points = [(i, s[page]) for i, s in enumerate(steps.values()) if page in s]
        ratios = [times["fa3"] / times["ours"] for _, times in points]
        rows = [i for i, _ in points]
        fill = {} if page == pages[0] else {"markerfacecolor": "white"}
        label = f"pages of {page}"
        axis.plot(ratios, rows, marks[page], label=label, color=COLORS["ours"], alpha=0.8, **fill)
    axis.axvline(1, color=COLORS["fa3"], linewidth=1, label="as fast as FA3")
    axis.set_yticks(range(len(steps)), [f"{name}: {_microseconds(s)}" for name, s in steps.items()])
    axis.set_ylabel("a step, and this library's time for it")
    axis.invert_yaxis()
    axis.set_xlabel("FA3's time / this library's (higher is better)")
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(pages) + 1)
    figure.suptitle(title, x=0.008, **MUTED)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _microseconds(of_page: dict[int, dict[str, float]]) -> str:
    times = [1e3 * times["ours"] for _, times in sorted(of_page.items())]
    return ", ".join(f"{t:,.0f}" if t >= 100 else f"{t:.1f}" for t in times) + " µs"
