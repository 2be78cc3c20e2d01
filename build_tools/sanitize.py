"""Runs the small GPU cases of tests/sanitize.py under compute-sanitizer: `make sanitize`.

`make sanitize TOOLS="memcheck"` runs one of its tools only.
"""

from __future__ import annotations

import os
import subprocess
import sys

from build_tools.cuda_tools import cuda_tool
from build_tools.probe import BuildError, find_gpus

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CASES = "tests.sanitize"


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
    for tool in argv or TOOLS:
        print(f"compute-sanitizer --tool {tool}", flush=True)
        command = [sanitizer, "--tool", tool, "--error-exitcode", "99", sys.executable, "-m", CASES]
        if subprocess.run(command, env=env).returncode:
            failed.append(tool)
    if failed:
        print(f"Failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
