"""Fetches the CUTLASS headers, pinned by version and hash, into third_party/cutlass.

`python third_party/fetch.py` does it; the build calls it too. Offline, give it the wheel:
`python third_party/fetch.py --wheel nvidia_cutlass-4.2.0.0-py3-none-any.whl`.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path, PurePosixPath

PACKAGE = "nvidia-cutlass"
VERSION = "4.2.0.0"
WHEEL = "nvidia_cutlass-4.2.0.0-py3-none-any.whl"
SHA256 = "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6"

HEADERS = "cutlass_library/source/include/"
LICENSE = f"nvidia_cutlass-{VERSION}.dist-info/licenses/LICENSE.txt"
CUTLASS = Path(__file__).resolve().parent / "cutlass"


class FetchError(RuntimeError):
    """The headers are not there and cannot be had."""


def fetch_cutlass(target: Path = CUTLASS, wheel: Path | None = None, sha256: str = SHA256) -> Path:
    """Returns the include folder. Does nothing when `target` already holds the pinned version."""
    stamp = target / "WHEEL.sha256"
    if stamp.exists() and stamp.read_text().strip() == sha256:
        return target / "include"
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename: a broken fetch leaves nothing behind.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".cutlass-") as folder:
        workspace = Path(folder)
        wheel = wheel or download(workspace)
        verify(wheel, sha256)
        fresh = workspace / "cutlass"
        extract(wheel, fresh)
        (fresh / stamp.name).write_text(sha256 + "\n")
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    return target / "include"


def verify(wheel: Path, sha256: str) -> None:
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != sha256:
        raise FetchError(f"{wheel.name} has sha256 {found}, but {sha256} is pinned: not used.")


def extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(HEADERS) and not name.endswith("/"):
                path = target / "include" / PurePosixPath(name[len(HEADERS) :])
            elif name == LICENSE:
                path = target / "LICENSE.txt"
            else:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))


def download(folder: Path) -> Path:
    problems = []
    for method in (_with_pip, _from_index):
        try:
            return method(folder)
        except (OSError, LookupError, subprocess.CalledProcessError) as error:
            problems.append(_short(error))
    raise FetchError(
        f"The CUTLASS headers ({PACKAGE}=={VERSION}) could not be downloaded "
        f"({'; '.join(problems)}): connect to a package index, or run "
        f"python third_party/fetch.py --wheel {WHEEL}"
    )


def _with_pip(folder: Path) -> Path:
    # -I: inside pip's build isolation PYTHONPATH hides pip itself.
    command = [sys.executable, "-I", "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / WHEEL


def _from_index(folder: Path) -> Path:
    """For environments without pip."""
    index = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_INDEX_URL")
    page = f"{(index or 'https://pypi.org/simple').rstrip('/')}/{PACKAGE}/"
    with urllib.request.urlopen(page, timeout=60) as reply:
        link = re.search(rf'href="([^"]*{re.escape(WHEEL)}[^"]*)"', reply.read().decode())
    if link is None:
        raise LookupError(f"{page} does not list {WHEEL}")
    url = urllib.parse.urljoin(page, html.unescape(link[1]))
    with urllib.request.urlopen(url, timeout=60) as reply:
        (folder / WHEEL).write_bytes(reply.read())
    return folder / WHEEL


def _short(error: Exception) -> str:
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="a downloaded wheel, for machines offline")
    options = parser.parse_args()
    try:
        print(fetch_cutlass(wheel=options.wheel))
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
