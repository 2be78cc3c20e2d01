"""``python -m benchmarks regret``: what the plans of calls cost, on problems drawn by a seed."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.regret import report
from benchmarks.regret.measure import Bench, Regret
from benchmarks.regret.problems import draw, large_groups

RESULTS = Path(__file__).resolve().parents[2] / "build" / "bench"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks regret",
        description="Draws problems, times every choice that their plans have, and reports the "
        "time of the chosen over that of the best.",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the problems (%(default)s)")
    parser.add_argument("--backward", type=int, default=160, help="problems (%(default)s)")
    parser.add_argument("--forward", type=int, default=120, help="problems (%(default)s)")
    parser.add_argument("--cache", type=int, default=120, help="problems (%(default)s)")
    parser.add_argument("--large-groups", action="store_true", help="these backwards before others")
    parser.add_argument("--seconds", type=float, default=600, help="at most (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file (default: in build/bench/)")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace, device: torch.device) -> list[Regret]:
    counts = {d: getattr(args, d) for d in ("backward", "forward", "cache")}
    problems = (large_groups() if args.large_groups else []) + draw(args.seed, counts)
    bench, end, regrets = Bench(device), time.time() + args.seconds, []
    for number, problem in enumerate(problems):
        if time.time() > end:
            print(f"stopped after {number} of {len(problems)} problems: {args.seconds:.0f} s")
            break
        regret = bench.measure(problem)
        if regret is not None:
            regrets.append(regret)
        if number % 20 == 19:
            torch.cuda.empty_cache()
            print(f"{number + 1} of {len(problems)} problems", file=sys.stderr, flush=True)
    return regrets


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if not torch.cuda.is_available():
        print("regret needs a GPU: it times kernels", file=sys.stderr)
        return 1
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    machine = {"gpu": properties.name, "l2_bytes": properties.L2_cache_size, "seed": args.seed}
    regrets = run(args, device)
    print(report.summary(regrets))
    path = args.out or RESULTS / "regret.json"
    report.write(regrets, machine, path)
    report.plot(regrets, machine, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
