"""Command line of the benchmarks: run presets, print a table, write JSON and a picture."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import torch

import flash_attn
from benchmarks import linear, report
from benchmarks.compare import regressions
from benchmarks.presets import NEEDS_GPU, PRESETS
from benchmarks.regret import __main__ as regret
from benchmarks.rows import Options, Row
from benchmarks.tune import __main__ as tune

# Git ignores a user's results. --record writes those that the documents quote.
RESULTS = Path(__file__).resolve().parent.parent / "build" / "bench"
RECORDS = Path(__file__).resolve().parent / "results"


def _numbers(text: str) -> set[int]:
    return {int(part) for part in text.split(",") if part}


def parse_arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    default = "ceiling,fwd,bwd,decode,host" if on_gpu else "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=(
            "Contenders take turns; each figure is a median. On a GPU the L2 cache is flushed "
            'before every sample. A contender that cannot do a problem is shown as "-", and at the '
            "end stands why."
        ),
    )
    parser.add_argument(
        "presets",
        nargs="?",
        default=default,
        help=f"comma-separated, of {', '.join(PRESETS)} (here: {default})",
    )
    parser.add_argument("--dims", type=_numbers, help="only these head dimensions: 64,128")
    parser.add_argument("--seqlens", type=_numbers, help="only these lengths: 1024,2048")
    parser.add_argument("--standard", action="store_true", help="also time softmax(QK^T)V")
    parser.add_argument("--expand-k", type=float, default=0.5, help="linear: width of k over v's")
    parser.add_argument("--compare", type=Path, help="JSON of an earlier run: exit 1 if slower")
    parser.add_argument("--threshold", type=float, default=0.05, help="of --compare (%(default)s)")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    out = parser.add_mutually_exclusive_group()
    out.add_argument("--out", type=Path, help="JSON file (default: in build/bench/)")
    out.add_argument(
        "--record", action="store_true",
        help="one JSON file a preset, named after the GPU, in benchmarks/results/, for documents",
    )  # fmt: skip
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args()
    args.presets = args.presets.split(",")
    if args.record and (args.dims or args.seqlens):
        parser.error("--record takes whole presets, without --dims and --seqlens")
    if unknown := set(args.presets) - set(PRESETS):
        parser.error(f"no preset {', '.join(sorted(unknown))}; there are {', '.join(PRESETS)}")
    if args.device == "cpu" and (gpu := NEEDS_GPU.intersection(args.presets)):
        rest = ", ".join(name for name in PRESETS if name not in NEEDS_GPU)
        parser.error(f"{', '.join(sorted(gpu))} needs a GPU; on a CPU there are: {rest}")
    return args


def describe_machine(device: torch.device) -> dict:
    machine = {
        "flash_attn": f"{flash_attn.__version__} ({flash_attn.__build__})",
        "torch": torch.__version__,
        "cpu_threads": torch.get_num_threads(),
        "processor": platform.machine(),
    }
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
        machine["cuda"] = torch.version.cuda
        machine["cudnn"] = torch.backends.cudnn.version()
    return machine


def measure(args: argparse.Namespace) -> list[Row]:
    """Rows of all presets, each printed as it is there; those that there are when interrupted."""
    options = Options(
        torch.device(args.device), dims=args.dims, seqlens=args.seqlens,
        with_standard=args.standard, expand_k=args.expand_k,
    )  # fmt: skip
    rows = []
    try:
        for preset in args.presets:
            for row in PRESETS[preset](options):
                rows.append(row)
                print(report.table_line(row), flush=True)
    except KeyboardInterrupt:
        if args.record:
            raise
        print("interrupted", flush=True)
    return rows


def write(args: argparse.Namespace, rows: list[Row], machine: dict, title: str) -> list[Path]:
    notes = linear.crossings(rows)
    print(*filter(None, [*notes, report.missing(rows), report.summary(rows)]), sep="\n")
    if args.record:
        return record(rows, machine)
    path = args.out or RESULTS / f"{'-'.join(args.presets)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(path, rows, machine, notes)
    if args.no_plot:
        return [path]
    report.plot(path.with_suffix(".png"), rows, title)
    return [path, path.with_suffix(".png")]


def record(rows: list[Row], machine: dict) -> list[Path]:
    """One file a preset: cpu.json, h200_fwd.json, h200_fwd_sm80.json."""
    gpu = machine.get("gpu", "cpu").removeprefix("NVIDIA ").lower().replace(" ", "-")
    arch = os.environ.get("FLASH_ATTN_ARCH")
    presets: dict[str, list[Row]] = {}
    for row in rows:
        presets.setdefault(row.preset, []).append(row)
    paths = []
    for preset, of_preset in presets.items():
        words = dict.fromkeys([gpu, preset, *([f"sm{arch}"] if arch else [])])
        paths.append(RECORDS / f"{'_'.join(words)}.json")
        report.write_json(paths[-1], of_preset, machine, linear.crossings(of_preset))
    return paths


def compare(args: argparse.Namespace, rows: list[Row]) -> int:
    """The exit code: 1 where something became slower, or nothing could be compared."""
    worse, compared = regressions(rows, args.compare, args.threshold)
    print(*worse, sep="\n")
    print(f"{compared} figures compared with {args.compare}, {len(worse)} are worse")
    return 1 if worse or not compared else 0


def main() -> int:
    if sys.argv[1:2] == ["regret"]:
        return regret.main(sys.argv[2:])
    if sys.argv[1:2] == ["tune"]:
        return tune.main(sys.argv[2:])
    args = parse_arguments()
    machine = describe_machine(torch.device(args.device))
    title = ", ".join(f"{name} {value}" for name, value in machine.items())
    print(title)
    start = time.perf_counter()
    rows = measure(args)
    if not rows:
        print("nothing fits --dims and --seqlens")
        return 0
    written = write(args, rows, machine, title)
    print(f"{time.perf_counter() - start:.0f} s; wrote {' and '.join(map(str, written))}")
    return compare(args, rows) if args.compare else 0


if __name__ == "__main__":
    sys.exit(main())
