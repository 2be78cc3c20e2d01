"""Command line of the benchmarks: run presets, print a table, write JSON and a plot."""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import torch

import flash_attn
from benchmarks import report
from benchmarks.presets import NEEDS_GPU, PRESETS, Options

RESULTS = Path(__file__).parent / "results"


def _numbers(text: str) -> set[int]:
    return {int(part) for part in text.split(",") if part}


def parse_arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    default = "ceiling,fwd,bwd,decode,host" if on_gpu else "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=(
            "Contenders take turns; each figure is a median. On a GPU the L2 cache is flushed "
            'before every sample. A contender that cannot do a problem is shown as "-"; VERBOSE=1 '
            "says why."
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
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--out", type=Path, help=f"JSON file (default: in {RESULTS.name}/)")
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args()
    args.presets = args.presets.split(",")
    if unknown := set(args.presets) - set(PRESETS):
        parser.error(f"no preset {', '.join(sorted(unknown))}; there are {', '.join(PRESETS)}")
    if args.device == "cpu" and (gpu := NEEDS_GPU.intersection(args.presets)):
        parser.error(f"{', '.join(sorted(gpu))} needs a GPU; on a CPU there are: cpu, host")
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


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.device)
    machine = describe_machine(device)
    title = ", ".join(f"{name} {value}" for name, value in machine.items())
    print(title)
    options = Options(device, args.dims, args.seqlens, args.standard)
    rows, start = [], time.perf_counter()
    for preset in args.presets:
        for row in PRESETS[preset](options):
            rows.append(row)
            print(report.table_line(row), flush=True)
    print(report.summary(rows))
    if not rows:
        print("nothing fits --dims and --seqlens")
        return
    path = args.out or RESULTS / f"{'-'.join(args.presets)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(path, rows, machine)
    written = [str(path)]
    if not args.no_plot:
        report.plot(path.with_suffix(".png"), rows, title)
        written.append(str(path.with_suffix(".png")))
    print(f"{time.perf_counter() - start:.0f} s; wrote {' and '.join(written)}")


if __name__ == "__main__":
    main()
