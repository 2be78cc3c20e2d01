"""Raises where the ``flash_attn`` beside this distribution is not that of the same repository."""

from __future__ import annotations

import flash_attn

if getattr(flash_attn, "__build__", None) is None:
    raise ImportError(
        "flash-attn-3 of this repository needs its flash-attn, and found that of another, "
        f"{flash_attn.__file__}: run `pip install .` in the repository's folder"
    )
