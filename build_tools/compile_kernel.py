"""Runs nvcc for one file, records what ptxas said, and fails where it lost speed.

ninja calls this as `python -m build_tools.compile_kernel [options] -- nvcc …`. ccache stands inside
the command: it repeats the messages of a cached compilation, so the checks always run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from build_tools import object_file, ptxas
from build_tools.instantiate import load_table


def main(argv: list[str]) -> int:
    split = argv.index("--")
    options, command = _parser().parse_args(argv[:split]), argv[split + 1 :]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wall = time.monotonic() - started
    if done.returncode:
        sys.stderr.write(done.stdout)
        return done.returncode

    _print_warnings(done.stdout)
    limits = dict(options.allow_spills)
    lost = ptxas.lost_speed(done.stdout, options.name, limits)
    _write_record(options, done.stdout, wall, lost)
    refused = ptxas.lost_speed(done.stdout, options.name, limits, ptxas.TUNED)
    if refused and options.strict:
        # Without its object file ninja tries this file again, also when nothing else changed.
        options.object.unlink(missing_ok=True)
        print(*(f"{options.name}: {sentence}" for sentence in refused), sep="\n", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="build_tools.compile_kernel")
    parser.add_argument("--name", required=True)
    parser.add_argument("--object", type=Path, required=True)
    parser.add_argument(
        "--allow-spills", type=_limit, action="append", default=[], help="ROW=bytes a thread"
    )
    parser.add_argument("--nvcc-release", required=True)
    parser.add_argument("--strict", action="store_true", help="lost speed is an error")
    return parser


def _limit(text: str) -> tuple[str, float]:
    row, _, limit = text.partition("=")
    return row, float(limit)


def _print_warnings(text: str) -> None:
    """The compiler's own warnings; the figures of ptxas go to the report."""
    lines = [line for line in text.splitlines() if line.strip()]
    shown = [line for line in lines if not line.startswith(("ptxas info", "    "))]
    if any("warning" in line for line in shown):
        print("\n".join(shown))


def _write_record(options, text: str, wall: float, lost: list[str]) -> None:
    smem = object_file.shared_memory(options.object)
    warps = {row.name: row.warps for row in load_table().VARIANTS}
    record = {
        "name": options.name,
        "nvcc": options.nvcc_release,
        "seconds": round(wall, 2),
        # ru_maxrss is the largest single process below this one: cicc or ptxas.
        "peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "lost_speed": lost,
        "kernels": [
            {
                **asdict(kernel),
                "spills": kernel.spills,
                "smem": kernel.static_smem + smem.get(kernel.name, 0),
                "warps": warps.get(kernel.name),  # None: not a row of the table
            }
            for kernel in ptxas.parse(text, options.name)
        ],
    }
    temporary = options.object.with_suffix(f".{os.getpid()}.json")
    temporary.write_text(json.dumps(record, indent=1))
    temporary.replace(record_path(options.object))


def record_path(obj: Path) -> Path:
    return obj.with_suffix(".json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
