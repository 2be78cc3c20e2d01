"""Figures of `fwd` and `bwd` as curves over the sequence length: the picture of the README."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

from benchmarks.report import COLORS, MUTED, NAMES, goal

# "fwd d128 b4 s4096 h16/16 bf16 causal"; grouped heads are points of their own and left out.
PROBLEM = re.compile(r"(fwd|bwd) d(\d+) b\d+ s(\d+) h(\d+)/\4 bf16 (full|causal)$")
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}

# (direction, mask) -> (head_dim, heads) -> contender -> seqlen -> TFLOP/s
Curves = dict[tuple[str, str], dict[tuple[int, int], dict[str, dict[int, float]]]]


def read(paths: list[Path]) -> Curves:
    curves: Curves = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            if match := PROBLEM.match(row["problem"]):
                direction, head_dim, seqlen, heads, mask = match.groups()
                panel = curves[direction, mask][int(head_dim), int(heads)]
                for contender, rate in row["rates"].items():
                    if rate is not None:
                        panel[contender][int(seqlen)] = rate
    return curves


def draw(curves: Curves, path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heads = sorted({key for panels in curves.values() for key in panels})
    figure, axes = plt.subplots(
        len(curves), len(heads), figsize=(2.6 * len(heads), 0.6 + 2.1 * len(curves)),
        sharex=True, sharey="row", squeeze=False, constrained_layout=True,
    )  # fmt: skip
    for line, ((direction, mask), panels) in zip(axes, curves.items()):
        for axis, key in zip(line, heads):
            for contender, points in panels[key].items():
                style = {"color": COLORS[contender], "marker": "o", "markersize": 3}
                axis.plot(*zip(*sorted(points.items())), label=NAMES.get(contender), **style)
            axis.set_xscale("log", base=2)
            axis.set_xticks([512, 2048, 8192], ["512", "2k", "8k"])
            axis.grid(color="#e8ebef")
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylim(bottom=0)
        line[0].set_ylabel(f"{DIRECTIONS[direction]}, {mask}\n{goal('TFLOP/s')}", fontsize=9)
    for axis, (head_dim, count) in zip(axes[0], heads):
        axis.set_title(f"head_dim {head_dim}, {count} heads", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length, tokens", fontsize=9)
    # Not every contender has all panels.
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    figure.legend(
        lines.values(),
        lines,
        loc="outside lower center",
        ncols=len(lines),
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(title, x=0.008, **MUTED)
    figure.savefig(path, dpi=110)
    plt.close(figure)
