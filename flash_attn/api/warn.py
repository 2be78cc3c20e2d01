"""Warnings that a program gets once, with the line of its own that calls this package."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

_OURS = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
_said: set[str] = set()


def warn_once(message: str, about: str | None = None) -> None:
    """Warns, unless it did before. about: what messages that differ in numbers have in common."""
    about = message if about is None else about
    if about not in _said:
        _said.add(about)
        warnings.warn(f"flash_attn: {message}", stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """From ``warn_once`` to the first frame that is neither this package's nor torch's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level
