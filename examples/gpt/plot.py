"""One picture of the run: the loss, and attention's time and memory."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, on machines without a display
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator

from examples.gpt.measure import Point

FLASH, STANDARD, MUTED = "#1f6feb", "#d1603d", "#9aa4b2"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.titlepad": 12,
    "grid.color": "#e8ebef",
    "grid.linewidth": 0.8,
    "font.size": 10,
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
    "axes.labelcolor": "#57606a",
    "legend.frameon": False,
}


def plot(
    path: Path,
    losses: list[tuple[float, float]],
    held_out: list[tuple[float, float]],
    sweeps: dict[str, list[Point]],
    subtitle: str,
) -> None:
    """``losses`` and ``held_out`` are (million bytes seen, loss); ``sweeps`` by name."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(14, 4.4), constrained_layout=True)
        _plot_loss(axes[0], losses, held_out)
        _plot_sweep(axes[1], sweeps, "milliseconds", "Time of attention, forward + backward", _time)
        axes[1].set_ylabel("time (lower is better)")
        _plot_sweep(axes[2], sweeps, "megabytes", "Peak memory of attention", _memory)
        axes[2].set_ylabel("memory (lower is better)")
        figure.suptitle(subtitle, x=0.008, ha="left", fontsize=9.5, color="#57606a")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _plot_loss(axis, losses, held_out) -> None:
    seen, loss = zip(*losses, strict=True)
    one = {"marker": "o", "markersize": 4} if len(loss) == 1 else {}  # no line, so a point
    axis.plot(seen, loss, color=FLASH, alpha=0.25, linewidth=0.8)
    axis.plot(seen, _smoothed(loss), color=FLASH, linewidth=2, label="training", **one)
    axis.plot(
        *zip(*held_out, strict=True), "o-", color=STANDARD, markersize=4, label="held-out files"
    )
    axis.set_title("Loss")
    axis.set_xlabel("million bytes seen")
    axis.set_ylabel("nats per byte (lower is better)")
    both = [*loss, *(value for _, value in held_out)]
    axis.set_ylim(bottom=0.8 * min(both), top=1.05 * max(both))
    axis.legend(loc="upper right")


def _smoothed(values) -> list[float]:
    """Exponential average over a twenty-fifth of the run, corrected for its start."""
    keep = 1 - 1 / max(1, len(values) / 25)
    average, weight, smooth = 0.0, 0.0, []
    for value in values:
        average, weight = keep * average + (1 - keep) * value, keep * weight + (1 - keep)
        smooth.append(average / weight)
    return smooth


def _plot_sweep(axis, sweeps: dict[str, list[Point]], field: str, title: str, unit) -> None:
    for (name, points), color in zip(sweeps.items(), (FLASH, STANDARD)):
        seqlens, values = [p.seqlen for p in points], [getattr(p, field) for p in points]
        label = f"{name}: {unit(values[-1], None)} at {_length(seqlens[-1])}"
        axis.plot(seqlens, values, "o-", color=color, linewidth=2, markersize=4, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10)
    axis.set_title(title)
    axis.set_xlabel("sequence length")
    ticks = sorted({p.seqlen for points in sweeps.values() for p in points})
    axis.set_xticks(ticks, [_length(t) for t in ticks])
    axis.yaxis.set_major_formatter(FuncFormatter(unit))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.minorticks_off()
    axis.legend(loc="upper left")


def _length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 else str(seqlen)


def _time(milliseconds: float, _) -> str:
    return f"{milliseconds / 1e3:.3g} s" if milliseconds >= 1e3 else f"{milliseconds:.3g} ms"


def _memory(megabytes: float, _) -> str:
    if megabytes >= 1000:
        return f"{megabytes / 1000:.3g} GB"
    return f"{megabytes:.0f} MB"
