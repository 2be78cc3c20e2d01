"""What is installed under the names of FlashAttention-3."""

from __future__ import annotations

from typing import Any

import flash_attn
import flash_attn_3

#: served_by: whose kernels run, and its release. build_flags: empty, since nothing is left out when
#: this is built. refused: arguments that raise NotImplementedError beside another.
CONFIG: dict[str, Any] = {
    "version": flash_attn_3.__version__,
    "served_by": f"flash_attn {getattr(flash_attn, '__build__', '')}",
    "build_flags": {},
    "refused": ["qv with cu_seqlens_k and without page_table"],
}


def show() -> None:
    """Prints CONFIG, an entry a line."""
    for name, value in CONFIG.items():
        print(f"{name}: {value}")
