"""Commands that tests of the build run, and scripts that stand in for some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def run(*command, check=True, cwd=ROOT, **env) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


def wheel_of(tmp_path: Path, **env) -> Path:
    """Built by setup.py in this environment."""
    build = tmp_path / "build"
    done = run(
        sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path),
        "build", "--build-base", str(build), "bdist_wheel", "--dist-dir", str(tmp_path),
        "--bdist-dir", str(tmp_path / "bdist"), **env,
    )  # fmt: skip
    assert done.returncode == 0
    (wheel,) = tmp_path.glob("*.whl")
    return wheel
