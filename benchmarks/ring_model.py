"""Time of one layer's attention against GPUs, links and lengths: where communication stops hiding.

    python -m benchmarks.ring_model [--seqlens 131072,1048576] [--heads 32 --heads-k 8]

A model, not a measurement: docs/distributed.md says how far off it is where both are known. Causal,
16 bits, forward and backward; a zigzag ring, or a ring of hosts with all-to-all inside each.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import MUTED

BYTES = 2  # of a number in 16 bits


@dataclass(frozen=True)
class Machine:
    forward: float = 655e12  # FLOP/s of the kernels, H200 at d 128, long sequences
    backward: float = 545e12
    inside: float = 270e9  # bytes/s each way between GPUs of one host, NVLink, as measured
    between: float = 45e9  # a 400 Gbit/s adapter for each GPU
    memory: float = 3.5e12
    step: float = 30e-6  # what a step of the ring costs beside its kernel
    host_gpus: int = 8


@dataclass(frozen=True)
class Layer:
    seqlen: int
    heads: int = 32
    heads_k: int = 8
    head_dim: int = 128
    batch: int = 1


@dataclass(frozen=True)
class Time:
    compute: float
    exposed: float  # transfers that nothing hides
    rest: float  # steps and merging

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.rest

    def __add__(self, other: Time) -> Time:
        return Time(
            self.compute + other.compute, self.exposed + other.exposed, self.rest + other.rest
        )


def flops(layer: Layer, backward: bool) -> float:
    """Operations of a causal call. A backward has five products where a forward has two."""
    forward = 2 * layer.batch * layer.heads * layer.head_dim * float(layer.seqlen) ** 2
    return 2.5 * forward if backward else forward


def ring(layer: Layer, ranks: int, link: float, machine: Machine, backward: bool) -> Time:
    """A zigzag ring: each step's transfer runs beside the kernel of the step before it.

    The rank that is worst off gets both halves of a step's keys, and sends as much back.
    """
    rate = machine.backward if backward else machine.forward
    kernel = flops(layer, backward) / ranks**2 / rate
    rows = layer.batch * layer.seqlen / ranks
    keys = 2 * rows * layer.heads_k * layer.head_dim * BYTES
    transfer = keys * (2 if backward else 1) / link
    # In the backward the last step's gradients travel when no kernel is left.
    tail = keys / link if backward and ranks > 1 else 0.0
    outputs = rows * layer.heads * layer.head_dim
    # Outputs, or dQ, of a step are added to the sum: in float32 from three ranks on.
    wide = 4 if ranks > 2 else BYTES
    merge = (ranks - 1) * 0.75 * outputs * (BYTES + 2 * wide) / machine.memory
    exposed = (ranks - 1) * max(0.0, transfer - kernel) + tail
    return Time(ranks * kernel, exposed, (ranks - 1) * machine.step + merge)


def all_to_all(layer: Layer, ranks: int, link: float, machine: Machine, backward: bool) -> Time:
    """The kernel, and what goes through the exchange beside it: nothing of that is hidden."""
    rows = layer.batch * layer.seqlen / ranks
    heads_k = max(layer.heads_k, ranks)
    heads = 2 * layer.heads + 2 * heads_k  # q and out, k and v; in the backward their gradients
    moved = rows * heads * layer.head_dim * BYTES
    # Each tensor is also brought into order before or after: read and written.
    exposed = moved * (ranks - 1) / ranks / link + 2 * moved / machine.memory
    rate = machine.backward if backward else machine.forward
    return Time(flops(layer, backward) / ranks / rate, exposed, machine.step)


def ring_of_hosts(layer: Layer, ranks: int, machine: Machine, backward: bool) -> Time:
    """A ring between hosts, in which each GPU has its share of the heads of its host's tokens."""
    inside = min(machine.host_gpus, ranks)
    hosts = ranks // inside
    share = Layer(
        layer.seqlen,
        layer.heads // inside,
        max(1, layer.heads_k // inside),
        layer.head_dim,
        layer.batch,
    )
    between = ring(share, hosts, machine.between, machine, backward)
    # The exchange inside is that of one host's tokens.
    tokens = Layer(layer.seqlen // hosts, layer.heads, layer.heads_k, layer.head_dim, layer.batch)
    exchange = all_to_all(tokens, inside, machine.inside, machine, backward)
    return between + Time(0.0, exchange.exposed, exchange.rest)


def hidden_from(layer: Layer, link: float, machine: Machine) -> float:
    """Tokens per rank of a ring from which the forward's transfers hide: kernel >= transfer.

    Nothing of the length or the head dim is left in it: the ratio of heads, and of rate to link.
    """
    return BYTES * layer.heads_k / layer.heads * machine.forward / link


def both(model, *args) -> Time:
    return model(*args, False) + model(*args, True)


MEASURED = Path(__file__).parent / "results" / "h200_ring.json"
MEASURED_GPUS = (2, 4)
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


def efficiencies(layer: Layer, machine: Machine) -> list[tuple[int, float, float]]:
    """(GPUs, of a ring over adapters, of a ring of hosts)"""
    one = both(ring, layer, 1, machine.inside, machine).total
    found = []
    for ranks in (*MEASURED_GPUS, *GPUS):
        flat, nested = times(layer, ranks, machine)
        found.append((ranks, one / ranks / flat, one / ranks / nested))
    return found


def times(layer: Layer, ranks: int, machine: Machine) -> tuple[float, float]:
    """Seconds of a ring over adapters, or inside one host, and of a ring of hosts."""
    link = machine.inside if ranks <= machine.host_gpus else machine.between
    flat = both(ring, layer, ranks, link, machine).total
    return flat, both(ring_of_hosts, layer, ranks, machine).total


def measured(seqlen: int, contender: str = "ring, zigzag") -> list[dict]:
    """Rows of benchmarks/ring.py."""
    rows = json.loads(MEASURED.read_text())["rows"]
    return [r for r in rows if (r["seqlen"], r["contender"]) == (seqlen, contender)]


def plot(path: Path, layers: list[Layer], machine: Machine) -> None:
    import matplotlib

    matplotlib.use("Agg")  # a file, on machines without a display
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    from examples.gpt.plot import STYLE

    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8, 4.6), constrained_layout=True)
        for layer, color in zip(layers, ("#1f6feb", "#d1603d", "#2da44e", "#9aa4b2")):
            ranks, flat, nested = zip(*efficiencies(layer, machine))
            label = f"{_count(layer.seqlen)} tokens"
            axis.plot(ranks, nested, "o-", color=color, markersize=4, label=label)
            axis.plot(ranks, flat, "--", color=color, alpha=0.6)
            points = [r for r in measured(layer.seqlen) if r["what"] == "fwd+bwd"]
            x, y = [r["ranks"] for r in points], [r["efficiency"] for r in points]
            axis.plot(x, y, "x", color=color, markersize=8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, map(str, ranks))
        axis.set_xlabel(f"GPUs, {machine.host_gpus} a host")
        axis.set_ylabel("efficiency, T(1) / (n T(n)) (higher is better)")
        axis.set_ylim(0, 1.05)
        axis.set_title("Ring attention, forward + backward: modelled, and measured up to 4 GPUs")
        kinds = {"ring of hosts": "-o", "ring over adapters": "--", "measured": "x"}
        lines, labels = axis.get_legend_handles_labels()
        for name, style in kinds.items():
            line, mark = style.strip("ox"), style.strip("-")
            labels.append(name)
            lines.append(Line2D([], [], linestyle=line, marker=mark, color="#57606a", markersize=4))
        figure.legend(lines, labels, loc="outside lower center", ncols=len(lines), fontsize=8)
        layer = layers[0]
        about = (
            f"H200, 16 bits, causal, batch {layer.batch}, {layer.heads} heads of q and "
            f"{layer.heads_k} of k and v, head_dim {layer.head_dim}; "
            f"{machine.inside / 1e9:.0f} GB/s in a host, {machine.between / 1e9:.0f} between hosts"
        )
        figure.suptitle(about, x=0.008, **MUTED)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _count(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}k"


def table(layers: list[Layer], machine: Machine) -> list[str]:
    lines = [
        f"{'tokens':>9} {'GPUs':>5} {'tokens/GPU':>10}   "
        f"{'ring over adapters':>22} {'ring of hosts':>22}   (ms, efficiency)"
    ]
    for layer in layers:
        one = both(ring, layer, 1, machine.inside, machine).total
        for ranks in GPUS:
            flat, nested = times(layer, ranks, machine)
            cells = [f"{1e3 * t:13.2f}  {one / ranks / t:6.3f}" for t in (flat, nested)]
            per_gpu = layer.seqlen // ranks
            lines.append(
                f"{layer.seqlen:>9} {ranks:>5} {per_gpu:>10}   {cells[0]:>22} {cells[1]:>22}"
            )
    return lines


def main() -> None:
    machine = Machine()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", default="131072,1048576,8388608")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--inside", type=float, default=machine.inside / 1e9, help="GB/s")
    parser.add_argument("--between", type=float, default=machine.between / 1e9, help="GB/s")
    parser.add_argument("--plot", type=Path, help="a picture of the efficiencies")
    args = parser.parse_args()
    machine = Machine(inside=1e9 * args.inside, between=1e9 * args.between)
    layers = [
        Layer(int(n), args.heads, args.heads_k, args.head_dim) for n in args.seqlens.split(",")
    ]
    print(*table(layers, machine), sep="\n")
    if args.plot:
        plot(args.plot, layers, machine)
    for name, link in (("in a host", machine.inside), ("between hosts", machine.between)):
        tokens = hidden_from(layers[0], link, machine)
        print(
            f"A ring {name} ({link / 1e9:.0f} GB/s) hides its transfers from {tokens:,.0f} tokens"
        )


if __name__ == "__main__":
    main()
