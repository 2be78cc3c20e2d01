"""Exact attention in linear memory: the drop-in ``flash_attn`` with a CPU and a CUDA backend."""

# The API that is served, and nothing else: a local label would make it greater than 2.8.3, and
# clients that accept up to 2.8.3 would pass the package by.
__version__ = "2.8.3"
#: This library's own release.
__build__ = "abi3.1"

from typing import TYPE_CHECKING, Any

from flash_attn import torch_attention
from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

if TYPE_CHECKING:
    from flash_attn._explain import Explanation as Explanation
    from flash_attn._explain import explain, explain_call

__all__ = [
    "explain",
    "explain_call",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

if torch_attention.has_registry():
    torch_attention.register()


def __getattr__(name: str) -> Any:
    """What few programs use: its module is imported by the first use."""
    if name in ("explain", "explain_call", "Explanation"):
        from flash_attn import _explain

        return getattr(_explain, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
