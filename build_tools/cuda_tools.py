"""Finds the CUDA tools that a build does not need but a kernel's author does."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from build_tools.probe import BuildError, find_nvcc

# What a toolkit made of pip's packages leaves out, and the package that brings it.
PACKAGES = {
    "cuobjdump": "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm",
    "compute-sanitizer": "nvidia-cuda-sanitizer-api",
}


def cuda_tool(name: str) -> Path:
    nvcc = find_nvcc()
    folders = [nvcc.root / "bin", nvcc.root / "compute-sanitizer"] if nvcc else []
    folders += sorted((Path(sysconfig.get_path("purelib")) / "nvidia").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"{name} is not in the CUDA toolkit here: pip install {PACKAGES[name]}")
    return Path(found)
