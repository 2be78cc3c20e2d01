"""The build report: registers, spills, shared memory, occupancy and time of every kernel.

`python -m build_tools.report` prints the last one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

from build_tools.compile_kernel import record_path
from build_tools.occupancy import MULTIPROCESSORS, runs_on

# In a GPU's column: thread blocks, and warps in them, that one of its SMs holds.
# The last two, time and the compiler's peak memory, are those of the file and its kernels together.
COLUMNS = ("kernel", "code", "registers", "spills", "stack", "smem", *MULTIPROCESSORS,
           "ptxas s", "file s", "MiB")  # fmt: skip


def write(objects: Iterable[Path], folder: Path) -> list[dict]:
    """Gathers the records beside the object files into report.json and report.txt."""
    paths = [record_path(obj) for obj in objects]
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    (folder / "report.json").write_text(json.dumps(records, indent=1) + "\n")
    (folder / "report.txt").write_text(table(records))
    return records


def table(records: Iterable[dict]) -> str:
    rows = [COLUMNS]
    for record in sorted(records, key=itemgetter("name")):
        for kernel in sorted(record["kernels"], key=itemgetter("name", "code")):
            figures = [kernel[key] for key in ("registers", "spills", "stack", "smem")]
            figures += [_occupancy(kernel, gpu) for gpu in MULTIPROCESSORS]
            times = [f"{kernel['seconds']:.1f}", f"{record['seconds']:.1f}", record["peak_mib"]]
            rows.append((kernel["name"], kernel["code"], *figures, *times))
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    lines = [_line(row, widths) for row in cells]
    notes = [f"{r['name']}: {sentence}" for r in records for sentence in r["lost_speed"]]
    return "\n".join(lines + (["", *notes] if notes else [])) + "\n"


def _occupancy(kernel: dict, gpu: str) -> str:
    if kernel["warps"] is None or not runs_on(kernel["code"], gpu):
        return ""
    blocks = MULTIPROCESSORS[gpu].blocks_of(kernel["registers"], kernel["warps"], kernel["smem"])
    return f"{blocks}x{kernel['warps']}" if blocks else "none"


def _line(row: list[str], widths: list[int]) -> str:
    left, right = row[:2], row[2:]
    cells = [cell.ljust(width) for cell, width in zip(left, widths)]
    cells += [cell.rjust(width) for cell, width in zip(right, widths[2:])]
    return "  ".join(cells).rstrip()


def main() -> int:
    path = Path("build/report.txt")
    if not path.exists():
        print("No build report: no kernels were built here yet (make build).", file=sys.stderr)
        return 1
    print(path.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
