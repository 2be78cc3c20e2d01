"""Variables of the build, read as the package reads its own.

By path: importing the package would import torch, which a build does not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from build_tools.probe import BuildError

_TABLE = Path(__file__).resolve().parent.parent / "flash_attn" / "_switches.py"
_spec = importlib.util.spec_from_file_location("flash_attn_switches", _TABLE)
table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(table)


def flag(name: str, env: Mapping[str, str], otherwise: bool = False) -> bool:
    """What a variable of yes or no says; `otherwise` where it is not set."""
    try:
        value = table.flag(name, env)
    except ValueError as error:
        raise BuildError(f"{error}.") from None
    return otherwise if value is None else value
