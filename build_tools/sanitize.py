"""Runs the small GPU cases of tests/sanitize.py under compute-sanitizer: `make sanitize`.

`make sanitize TOOLS="memcheck"` runs one of its tools only.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

from build_tools.cuda_tools import cuda_tool
from build_tools.probe import BuildError, find_gpus

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CASES = "tests.sanitize"


def families() -> tuple[str, ...]:
    """What this GPU runs by itself, and on Hopper the kernels that every other GPU runs as well."""
    return ("", "80") if find_gpus()[0].capability.startswith("9.") else ("",)


def main(argv: list[str]) -> int:
    unknown = set(argv) - set(TOOLS)
    if unknown:
        print(f"No such tool: {', '.join(unknown)}; there are {', '.join(TOOLS)}.", file=sys.stderr)
        return 2
    if not find_gpus():
        print("compute-sanitizer needs a GPU, and nvidia-smi shows none.", file=sys.stderr)
        return 1
    try:
        sanitizer = cuda_tool("compute-sanitizer")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    # torch's caching allocator hands out memory that was written before, which hides overruns and
    # reads of what was never written.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for tool, family in itertools.product(argv or TOOLS, families()):
        what = f"{tool}, FLASH_ATTN_ARCH={family or 'unset'}"
        print(f"compute-sanitizer --tool {what}", flush=True)
        command = [sanitizer, "--tool", tool, "--error-exitcode", "99"]
        command += [sys.executable, "-m", CASES, tool]
        if subprocess.run(command, env=env | {"FLASH_ATTN_ARCH": family}).returncode:
            failed.append(what)
    if failed:
        print(f"Failed: {'; '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
