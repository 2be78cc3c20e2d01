"""Results of the grids as curves over the sequence length, for the README.

    python -m benchmarks.curves benchmarks/results/h200_fwd.json benchmarks/results/h200_bwd.json \
        --out docs/h200.png
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

from benchmarks.report import COLORS

# "fwd d128 b4 s4096 h16/16 bf16 causal"; grouped heads are points of their own and left out.
PROBLEM = re.compile(r"(fwd|bwd) d(\d+) b\d+ s(\d+) h(\d+)/\4 bf16 (full|causal)$")
NAMES = {"ours": "this library", "fa3": "FA3", "cudnn": "cuDNN", "fa2": "FA2 (torch)"}

# (direction, mask) -> head_dim -> contender -> seqlen -> TFLOP/s
Curves = dict[tuple[str, str], dict[int, dict[str, dict[int, float]]]]


def read(paths: list[Path]) -> Curves:
    curves: Curves = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            if match := PROBLEM.match(row["problem"]):
                direction, head_dim, seqlen, _, mask = match.groups()
                for contender, rate in row["rates"].items():
                    curves[direction, mask][int(head_dim)][contender][int(seqlen)] = rate
    return curves


def draw(curves: Curves, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    head_dims = sorted({d for panels in curves.values() for d in panels})
    figure, axes = plt.subplots(
        len(curves), len(head_dims), figsize=(2.6 * len(head_dims), 2.1 * len(curves)),
        sharex=True, sharey="row", squeeze=False, constrained_layout=True,
    )  # fmt: skip
    for line, ((direction, mask), panels) in zip(axes, curves.items()):
        for axis, head_dim in zip(line, head_dims):
            for contender, points in panels[head_dim].items():
                style = {"color": COLORS[contender], "marker": "o", "markersize": 3}
                axis.plot(*zip(*sorted(points.items())), label=NAMES.get(contender), **style)
            axis.set_xscale("log", base=2)
            axis.set_xticks([512, 2048, 8192], ["512", "2k", "8k"])
            axis.grid(color="#e8ebef")
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylim(bottom=0)
        line[0].set_ylabel(f"{direction} {mask}\nTFLOP/s")
    for axis, head_dim in zip(axes[0], head_dims):
        axis.set_title(f"head_dim {head_dim}", fontsize=10)
    # Not every contender has all panels.
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    figure.legend(
        lines.values(),
        lines,
        loc="outside upper center",
        ncols=len(lines),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves")
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of fwd and bwd")
    parser.add_argument("--out", type=Path, required=True, help="PNG file")
    args = parser.parse_args()
    draw(read(args.results), args.out)


if __name__ == "__main__":
    main()
