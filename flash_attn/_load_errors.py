"""Why the compiled library does not load: what was found, what it expects, what to do."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

# What the dynamic loader says → (what the library expects, what to do). {0} is the first group.
_CAUSES: list[tuple[str, str, str]] = [
    (
        r"libcudart\.so\.(\d+)",
        "it was built for CUDA {0}, so a torch that uses CUDA {0}",
        "install a build for the same CUDA major version",
    ),
    (
        r"version [`'](GLIBC_[\d.]+)' not found",
        "{0}, so a newer Linux",
        "build it on this system (pip install --no-build-isolation . in a clone)",
    ),
    (
        r"version [`']((?:GLIBCXX|CXXABI)_[\d.]+)' not found",
        "a libstdc++ with {0}",
        "update libstdc++; an environment's own, as conda's, comes before the system's",
    ),
    (
        r"undefined symbol: ((?:aoti_)?torch_\w+)",
        "torch >= 2.10, whose C interface has {0}",
        "update torch",
    ),
    (
        r"(invalid ELF header|wrong ELF class|file too short|cannot open shared object file)",
        "the file whole, on Linux x86_64, and torch's libraries beside it",
        "install it again",
    ),
]
_UNKNOWN = (
    "torch >= 2.10 of the CUDA it was built for, Python >= 3.10",
    "build it for this environment (pip install --no-build-isolation . in a clone)",
)


def explain(path: Path, message: str) -> str:
    """One paragraph about an ImportError of the library at ``path``."""
    if torch.version.cuda is None:
        return (
            f"this torch ({torch.__version__}) has no CUDA, so {path.name} does not load: {message}"
        )
    expected, do = _UNKNOWN
    for pattern, needs, advice in _CAUSES:
        match = re.search(pattern, message)
        if match:
            expected, do = needs.format(*match.groups()), advice
            break
    return f"{path} does not load: {message}. Found: {_found()}. Expected: {expected}. Do: {do}"


def _found() -> str:
    libc = " ".join(platform.libc_ver()) or "an unknown libc"
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, which uses CUDA "
        f"{torch.version.cuda}, {libc} on {platform.system()} {platform.machine()}"
    )
