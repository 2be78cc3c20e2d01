"""Tests what torch's own attention makes of this library, with the newest torch that pip finds.

`python -m build_tools.newest_torch` makes an environment of its own, build/newest, which takes a
minute or two. Where pip finds no torch it says so, and that is no failure.
"""

from __future__ import annotations

import os
import subprocess
import sys

from build_tools import make_env, probe

VENV = make_env.ROOT / "build" / "newest"
# What torch has under other names, and a taste of the rest.
TESTS = (
    "tests/test_torch_attention.py",
    "tests/distributed/test_torch_attention.py",
    "tests/fa3/test_torch.py",
    "tests/fa3/test_operators.py",
    "tests/fa3/test_signatures.py",
    "tests/fa3/test_clients.py",
    "tests/test_versions.py",
)


def main(arguments: list[str]) -> int:
    python = VENV / "bin" / "python"
    try:
        if not python.exists():
            make_env.create(VENV, shared=False)
        make_env.install_torch(python, "torch")
        make_env.pip(python, "pytest>=8", "expecttest", "numpy")
    except (probe.BuildError, subprocess.CalledProcessError) as error:
        print(f"flash-attn: not tested with the newest torch, which cannot be installed: {error}")
        return 0
    code = "import torch; print('flash-attn: the newest torch here is', torch.__version__)"
    subprocess.run([python, "-c", code], check=True)
    # Kernels on the host are built for the suite's torch.
    command = [python, "-m", "pytest", "-q", "-k", "not host", *TESTS, *arguments]
    return subprocess.run(
        command, cwd=make_env.ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
