"""What this machine has: nvcc, GPUs, torch. Nothing here imports torch.

torch is looked up by path because a build runs in an isolated environment, which has another
torch or none, while the headers must be those of the environment that the wheel will live in.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class BuildError(RuntimeError):
    """A build that cannot go on; the message is one sentence for the person who started it."""


@dataclass(frozen=True)
class Nvcc:
    path: Path
    root: Path  # the toolkit: bin/, include/, lib64/
    release: str  # "13.0.88"

    @property
    def version(self) -> tuple[int, int]:
        major, minor, *_ = self.release.split(".")
        return int(major), int(minor)


@dataclass(frozen=True)
class Torch:
    root: Path  # the package folder, with include/ and lib/
    version: str  # "2.13.0+cpu"
    cuda: str | None  # "13.0"; None for a torch without CUDA

    @property
    def release(self) -> tuple[int, int]:
        major, minor = re.match(r"(\d+)\.(\d+)", self.version).groups()
        return int(major), int(minor)


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str  # "9.0"


def _output(*command: str | Path) -> str:
    """stdout and stderr of a command, or "" when it cannot run or fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def find_nvcc(env: Mapping[str, str] = os.environ) -> Nvcc | None:
    """The first nvcc that runs, of $CUDA_HOME, $CUDA_PATH, $PATH and /usr/local/cuda."""
    homes = [env[name] for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes]
    on_path = shutil.which("nvcc", path=env.get("PATH"))
    candidates += [Path(on_path)] if on_path else []
    candidates += [Path("/usr/local/cuda/bin/nvcc")]
    for path in candidates:
        release = re.search(r"release [\d.]+, V([\d.]+)", _output(path, "--version"))
        if release:
            return Nvcc(*_real_location(path), release=release[1])
    return None


def _real_location(nvcc: Path) -> tuple[Path, Path]:
    # The nvcc on PATH may be a link or a script, so ask it where its toolkit is.
    dryrun = _output(nvcc, "--dryrun", "-x", "cu", os.devnull, "-c", "-o", os.devnull)
    top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    root = Path(top[1]).resolve() if top else nvcc.resolve().parent.parent
    real = root / "bin" / "nvcc"
    return (real if real.exists() else nvcc), root


def gpu_codes(nvcc: Nvcc) -> set[str]:
    """Machine codes this nvcc can write, e.g. {"80", "90", "100"}."""
    return set(re.findall(r"sm_(\d+)", _output(nvcc.path, "--list-gpu-code")))


def find_gpus() -> list[Gpu]:
    query = ("--query-gpu=name,compute_cap", "--format=csv,noheader")
    rows = [line.rsplit(",", 1) for line in _output("nvidia-smi", *query).splitlines()]
    return [
        Gpu(name.strip(), capability.strip())
        for name, capability in (row for row in rows if len(row) == 2)
        if re.fullmatch(r"\s*\d+\.\d+\s*", capability)
    ]


def find_torch(env: Mapping[str, str] = os.environ) -> Torch | None:
    """The torch of the target environment; $FLASH_ATTN_TORCH_DIR overrides the search."""
    override = env.get("FLASH_ATTN_TORCH_DIR")
    if override:
        folders = [Path(override), Path(override) / "torch"]
    else:
        folders = [Path(folder) / "torch" for folder in site_folders()]
    for folder in folders:
        try:
            text = (folder / "version.py").read_text()
        except OSError:
            continue
        version = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"](.+?)['\"]", text, re.MULTILINE)
        cuda = re.search(r"^cuda\s*(?::[^=]*)?=\s*['\"](.+?)['\"]", text, re.MULTILINE)
        if version:
            return Torch(folder.resolve(), version[1], cuda[1] if cuda else None)
    if override:
        raise BuildError(f"FLASH_ATTN_TORCH_DIR={override} holds no torch/version.py.")
    return None


def site_folders() -> list[str]:
    """Folders a package of the target environment may be in, nearest first.

    pip's isolated build takes site-packages off sys.path but runs the same interpreter, so
    sysconfig still knows where they are.
    """
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    in_venv = sys.prefix != sys.base_prefix
    if not in_venv or _venv_sees_system(Path(sys.prefix)):
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        folders.append(site.getusersitepackages())
        folders += [sysconfig.get_path(name, vars=base) for name in ("purelib", "platlib")]
        folders += site.getsitepackages([sys.base_prefix])
    folders += sys.path
    return list(dict.fromkeys(folder for folder in folders if folder))


def _venv_sees_system(prefix: Path) -> bool:
    try:
        text = (prefix / "pyvenv.cfg").read_text()
    except OSError:
        return False
    return bool(re.search(r"include-system-site-packages\s*=\s*true", text, re.IGNORECASE))
