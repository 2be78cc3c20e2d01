"""``python -m benchmarks tune``: fits the cost model's numbers to a GPU, and writes its file."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.regret import report
from benchmarks.regret.measure import Bench, Regret
from benchmarks.regret.problems import Problem, draw
from benchmarks.tune.fit import Data, Fit, Part
from benchmarks.tune.machine_file import constant_of, name_of, text_of
from benchmarks.tune.model import CSRC, Model

MACHINES = CSRC / "plan" / "machines"
MEASURED = Path(__file__).resolve().parents[2] / "build" / "bench" / "tune.json"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tune",
        description="Measures the choices of problems that are drawn by a seed, fits the numbers "
        "of the cost model to the half of them, judges these on the other half, and writes the "
        "GPU's file. For GPUs of compute capability 9.0.",
    )
    parser.add_argument("--seconds", type=float, default=420, help="of measuring (%(default)s)")
    parser.add_argument("--fit-seconds", type=float, default=90, help="at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (%(default)s)")
    parser.add_argument(
        "--from", dest="files", nargs="+", type=Path, metavar="FILE",
        help="JSON of runs of tune or regret on one GPU, instead of measuring",
    )  # fmt: skip
    parser.add_argument("--name", help="of the machine: h100 (default: from the GPU's name)")
    parser.add_argument("--out", type=Path, help="file (default: csrc/plan/machines/<name>.h)")
    return parser.parse_args(arguments)


def _rate(run: Callable[[], object], bytes_moved: int) -> float:
    """Bytes in a µs, the median of 20."""
    times = []
    for _ in range(23):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return bytes_moved / float(np.median(times[3:]))


def describe_machine(device: torch.device, seed: int) -> dict:
    properties = torch.cuda.get_device_properties(device)
    size = 2**30
    source, target = (torch.zeros(size // 4, device=device) for _ in range(2))
    rates = {
        "memory": _rate(lambda: target.copy_(source), 2 * size),
        "reads": _rate(source.sum, size),
    }
    return {
        "gpu": properties.name, "l2_bytes": properties.L2_cache_size, "seed": seed,
        "sm_count": properties.multi_processor_count, "rates": rates,
    }  # fmt: skip


def measure(args: argparse.Namespace) -> tuple[dict, list[Regret]]:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device) != (9, 0):
        found = "{}.{}".format(*torch.cuda.get_device_capability(device))
        sys.exit(f"tune fits times of kernels for compute capability 9.0; this GPU has {found}")
    machine = describe_machine(device, args.seed)
    problems = draw(args.seed, {"backward": 1000, "forward": 600, "cache": 800})
    random.Random(args.seed).shuffle(problems)  # all directions, whenever time is up
    bench, regrets, end = Bench(device), [], time.time() + args.seconds
    for number, problem in enumerate(problems):
        if time.time() > end:
            break
        regret = bench.measure(problem)
        regrets += [regret] if regret is not None else []
        if number % 20 == 19:
            torch.cuda.empty_cache()
            left = max(end - time.time(), 0)
            print(f"{number + 1} problems measured, {left:.0f} s left", file=sys.stderr, flush=True)
    report.write(regrets, machine, MEASURED)
    print(f"wrote {MEASURED}")
    return machine, regrets


def load(files: list[Path]) -> tuple[dict, list[Regret]]:
    regrets, machines = [], []
    for file in files:
        data = json.loads(file.read_text())
        machines.append(data["machine"])
        for row in data["regrets"]:
            words = {k: tuple(v) if isinstance(v, list) else v for k, v in row["problem"].items()}
            fields = ("choices", "measured", "predicted", "chosen", "confirmed")
            regrets.append(Regret(Problem(**words), *(row[field] for field in fields)))
    gpus = {machine["gpu"] for machine in machines}
    if len(gpus) > 1:
        sys.exit(f"--from takes runs on one GPU; these are of {', '.join(sorted(gpus))}")
    return machines[0], regrets


def judge(part: Part) -> dict[str, tuple[int, float, float]]:
    """For each direction: problems, the geometric mean of chosen over best, and the share of best
    choices whose time is predicted within 10%, of the problems whose lengths the plan knows.
    Problems whose chosen was not measured do not count for the mean."""
    chosen, error = np.log(part.regret_of_plans()), part.error_of_best()
    found = {}
    for direction in ("backward", "forward", "cache"):
        of_it = np.array([p.direction == direction for p in part.problems])
        if of_it.any():
            near = abs(error[of_it & part.known] - 1) < 0.1
            mean = float(np.exp(np.nanmean(chosen[of_it])))
            found[direction] = int(of_it.sum()), mean, float(near.mean()) if len(near) else np.nan
    return found


def tuned(machine: dict, regrets: list[Regret], seconds: float) -> Model:
    """The model with fitted numbers; prints what they are worth."""
    model = Model(machine["l2_bytes"], machine.get("sm_count", 0))
    data = Data(model, regrets)
    if np.isfinite(data.best).sum() < 2:
        sys.exit(f"none of {len(regrets)} measured problems can be fitted: choices differ")
    fitted, judged = data.halves()
    before = judge(judged)
    Fit(fitted, data, machine.get("rates", {})).run(seconds, print)
    print("on problems that were not fitted, before → after:")
    for direction, (count, *after) in judge(judged).items():
        _, *earlier = before[direction]
        regret, near = (f"{a:.4f} → {b:.4f}" for a, b in zip(earlier, after))
        print(f"  {direction}, {count} problems: chosen over best {regret}; ", end="")
        print(f"share of the best choices' times predicted within 10% {near}")
    return model


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if not args.files and not torch.cuda.is_available():
        print("tune needs a GPU, or --from with the JSON of earlier runs", file=sys.stderr)
        return 1
    machine, regrets = load(args.files) if args.files else measure(args)
    model = tuned(machine, regrets, args.fit_seconds)
    name = args.name or name_of(machine["gpu"])
    path = args.out or MACHINES / f"{name}.h"
    path.write_text(text_of(model, machine["gpu"], name))
    print(f"wrote {path}; {constant_of(name)} belongs into kMachines of {MACHINES / 'nearest.h'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
