"""Installs a wheel where nothing else is, and asks it to test itself.

`python -m build_tools.try_wheel dist/*.whl` takes this Python and its torch. For others:
`--python python3.13 --torch torch==2.10.0`, of which pip then downloads the latter. `--fa3` has the
wheel of FlashAttention-3's names, which is installed beside it and has to compute the same.

A torch without CUDA leaves the library alone, so there it is loaded by itself, with every symbol
resolved: by CUDA's runtime of the toolkit, that torch's own libraries, and a stand-in for the one
symbol that only a torch for CUDA has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from build_tools import probe

_WHERE = "import sysconfig; print(sysconfig.get_path('purelib'))"
_SHARED = "import sys; print('\\n'.join(p for p in sys.path if p.endswith('-packages')))"
_TORCH = "import torch, pathlib; print(pathlib.Path(torch.__file__).parent / 'lib')"
_FA3 = """
import torch, flash_attn, flash_attn_interface
q, k, v = torch.randn(3, 1, 9, 2, 8)
same = torch.equal(*(m.flash_attn_func(q, k, v) for m in (flash_attn, flash_attn_interface)))
print(same and hasattr(torch.ops.flash_attn_3, "fwd"), flash_attn_interface.__file__)
"""
LOAD = "import sys; sys.path.insert(0, sys.argv[1]); import _C; print(_C.cuda_version())"


class Failed(Exception):
    """The wheel does not keep its promise; the message says how."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default=sys.executable, help="an interpreter, 3.10 or newer")
    parser.add_argument("--torch", help="what to install; without it, that of --python is shared")
    parser.add_argument("--fa3", type=Path, help="the wheel of FlashAttention-3's names")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(attempt(options.wheel.resolve(), options.python, options.torch, Path(folder)))
            if options.fa3:
                print(attempt_fa3(options.fa3.resolve(), Path(folder)))
        except Failed as error:
            print(f"{options.wheel.name}: {error}", file=sys.stderr)
            return 1
    return 0


def attempt(wheel: Path, python: str, torch: str | None, folder: Path) -> str:
    """What was tried and came out well; raises Failed otherwise."""
    inside = environment(wheel, python, torch, folder)
    said = output([inside, "-m", "flash_attn", "--json"], folder)
    found = json.loads(said)
    tests = found["self_test"]
    where = f"Python {found['python']}, torch {found['torch']}"
    if not tests or any(test["status"] == "failed" for test in tests):
        raise Failed(f"{where}: the self-test failed: {tests}")
    line = f"{wheel.name}: {where}: {len(tests)} tests passed"
    if wheel.name.endswith("-any.whl"):
        return line
    if found["torch_cuda"]:
        if found["library"] is None:
            raise Failed(f"{where}: {found['why_no_cuda']}")
        return f"{line}, {len(found['variants'])} kernels"
    version = output(
        [inside, "-c", LOAD, package(inside, folder)], folder, **beside(inside, folder)
    )
    return f"{line}, the library loads by itself (CUDA {int(version) // 1000})"


def attempt_fa3(wheel: Path, folder: Path) -> str:
    """The same of the second wheel, in the environment that `attempt` has made in this folder."""
    inside = folder / "venv" / "bin" / "python"
    output([*_pip(inside), "--no-deps", wheel], folder)
    works, _, file = output([inside, "-c", _FA3], folder).strip().partition(" ")
    if works != "True" or folder not in Path(file).parents:
        raise Failed(f"{file} does not compute what flash_attn does, or lacks its operators")
    return f"{wheel.name}: beside it, with the same results"


def _pip(inside: Path) -> list:
    return [sys.executable, "-m", "pip", "-q", "--python", inside, "install"]


def environment(wheel: Path, python: str, torch: str | None, folder: Path) -> Path:
    """A virtual environment with torch and the wheel; its interpreter."""
    output([python, "-m", "venv", "--without-pip", folder / "venv"], folder)
    inside = folder / "venv" / "bin" / "python"
    pip = _pip(inside)
    if torch:
        output([*pip, torch], folder)
    output([*pip, "--no-deps", wheel], folder)
    if not torch:
        site = package(inside, folder).parent
        (site / "shared.pth").write_text(output([python, "-c", _SHARED], folder))
    return inside


def package(inside: Path, folder: Path) -> Path:
    return Path(output([inside, "-c", _WHERE], folder).strip()) / "flash_attn"


def beside(inside: Path, folder: Path) -> dict[str, str]:
    """Variables by which the library finds all its symbols beside a torch without CUDA."""
    torch = output([inside, "-c", _TORCH], folder).strip()
    return loading(Path(torch), folder)


def loading(torch: Path, folder: Path) -> dict[str, str]:
    """The same for a folder of torch's libraries."""
    nvcc = probe.find_nvcc()
    if nvcc is None:
        raise Failed("no CUDA toolkit, whose runtime the library needs")
    source, stub = folder / "stub.cpp", folder / "stub.so"
    source.write_text(
        'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }'
    )
    output(["g++", "-shared", "-fPIC", source, "-o", stub], folder)
    return {
        "LD_LIBRARY_PATH": f"{torch}:{nvcc.root / 'lib64'}",
        "LD_PRELOAD": str(stub),
        "LD_BIND_NOW": "1",
    }


def output(command: list, folder: Path, **env: str) -> str:
    """What a command prints, run where no checkout is importable."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder, env={**clean, **env}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
