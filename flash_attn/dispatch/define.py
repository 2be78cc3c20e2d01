"""Operations of ``torch.ops.flash_attn``, defined from their schemas."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["defined"]


def defined(schemas: Mapping[str, str], kind: str = "FRAGMENT") -> torch.library.Library:
    """The library of operations by name, which has to live as long as they do.

    kind: "DEF" for the first library of the namespace.
    """
    library = torch.library.Library("flash_attn", kind)
    for name, schema in schemas.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    return library
