"""The C++ compiler for what runs on this machine without the library: tests, and ``make tune``."""

from __future__ import annotations

import os
import shutil

__all__ = ["find"]


def find(missing: type[Exception]) -> str:
    """$CXX, or the first of g++, c++ and clang++; raises ``missing`` where there is none."""
    asked = os.environ.get("CXX")
    names = [asked] if asked else ["g++", "c++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise missing(f"no C++ compiler: looked for {', '.join(names)}")
