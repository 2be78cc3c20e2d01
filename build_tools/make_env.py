"""Makes the development environment .venv. Needs Python >= 3.10 and nothing else.

`python3 build_tools/make_env.py .venv test demo` creates it if need be and installs torch, then
this checkout (editable, without kernels: `make build` puts those in place), then the extras named.
A Python that already has a new enough torch shares it, so that a machine set up for its GPU keeps
the torch that fits; otherwise torch is installed at the version given by --torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build_tools import probe  # noqa: E402
from build_tools.plan import MIN_TORCH  # noqa: E402

# Without a GPU the CUDA libraries that the default index's torch pulls in, about 3 GB, are useless.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    options = _parser().parse_args()
    try:
        make(options)
    except probe.BuildError as error:
        print(f"flash-attn: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        print(f"flash-attn: this failed, see above: {command}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml")
    parser.add_argument("--torch", default="torch==2.13.0", help="installed if there is none")
    return parser


def make(options: argparse.Namespace) -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - this script runs on what the machine has
        found = ".".join(map(str, sys.version_info[:3]))
        raise probe.BuildError(
            f"Python >= 3.10 is needed, {sys.executable} is {found}: make PYTHON=python3.11 ..."
        )
    python = options.venv / "bin" / "python"
    if not python.exists():
        torch = torch_here()
        create(options.venv, shared=torch is not None)
        if torch and not torch_in(python):
            show_folder(python, torch.root.parent)
    if not torch_in(python):
        install_torch(python, options.torch)
    install_package(python, options.extras)


def torch_here() -> probe.Torch | None:
    """The torch of the Python that runs this, if it is new enough."""
    torch = probe.find_torch({})
    return torch if torch and torch.release >= MIN_TORCH else None


def create(venv: Path, shared: bool) -> None:
    sees = f"sharing {sys.executable}'s torch" if shared else "separate"
    print(f"flash-attn: making {venv} ({sees})", flush=True)
    flags = ["--system-site-packages"] if shared else []
    # In two steps, so that a missing ensurepip (Debian's python3-venv) leaves no broken folder.
    for tool in ("venv", "virtualenv"):
        done = subprocess.run(
            [sys.executable, "-m", tool, *flags, str(venv)], capture_output=True, text=True
        )
        if done.returncode == 0:
            return
        shutil.rmtree(venv, ignore_errors=True)
    raise probe.BuildError(
        f"{sys.executable} can make no virtual environment: apt-get install python3-venv, "
        "or pip install virtualenv."
    )


def show_folder(python: Path, packages: Path) -> None:
    """For a Python that is a virtual environment's own: --system-site-packages shows what the
    Python has that it was made of, and nothing of the environment."""
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    (Path(site) / "shared.pth").write_text(f"{packages}\n")


def torch_in(python: Path) -> bool:
    # Asked by path, as the build asks it, in the environment's own interpreter.
    code = (
        "from build_tools import probe, plan; t = probe.find_torch({}); "
        "raise SystemExit(not (t and t.release >= plan.MIN_TORCH))"
    )
    return subprocess.run([python, "-c", code], cwd=ROOT).returncode == 0


def install_torch(python: Path, requirement: str) -> None:
    if not probe.find_gpus():
        # Alone: where this index cannot be reached, each dependency would wait for it as well.
        command = [python, "-m", "pip", "install", "--quiet", "--retries", "0", "--no-deps"]
        subprocess.run([*command, "--index-url", CPU_INDEX, requirement], capture_output=True)
    pip(python, requirement)


def install_package(python: Path, extras: list[str]) -> None:
    pip(python, "setuptools>=77", "wheel", "ninja>=1.11")
    # torch is there, so nothing may replace it: the constraint names exactly this one.
    version = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        constraint = Path(folder) / "constraints.txt"
        constraint.write_text(f"torch=={version}\n")
        target = f".[{','.join(extras)}]" if extras else "."
        pip(
            python, "--no-build-isolation", "--constraint", str(constraint), "--editable", target,
            FLASH_ATTN_CUDA_ARCHS="none",
        )  # fmt: skip


def pip(python: Path, *arguments: str, **env: str) -> None:
    print(f"flash-attn: pip install {' '.join(arguments)}", flush=True)
    # Twice quiet: errors only.
    command = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    settings = {"PIP_ROOT_USER_ACTION": "ignore", **env}
    subprocess.run([*command, *arguments], cwd=ROOT, check=True, env={**os.environ, **settings})


if __name__ == "__main__":
    sys.exit(main())
