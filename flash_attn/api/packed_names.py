"""What is wrong with a call, in the caller's own names; on the failing path alone.

Functions that take qkv or kv share the checks of those that take q, k and v, which name these.
"""

from __future__ import annotations

import re

from torch import Tensor
from torch.compiler import is_compiling

from flash_attn.api import checks

_LENGTHS = re.compile(r"\b(cu_seqlens|max_seqlen)_[qk]\b")


def renamed(error: Exception, packed: Tensor) -> Exception:
    """What to raise for a call with qkv (…, 3, heads, head_dim) or kv (…, 2, heads_k, head_dim)."""
    if type(error) not in (TypeError, ValueError):
        return error
    name = "qkv" if packed.shape[-3] == 3 else "kv"
    try:
        checks.rows(packed, name, is_compiling())  # whose strides are not those of a slice
    except ValueError as own:
        return own
    text = re.sub(f"^[{name}]: ", f"{name}: ", str(error))
    if text.startswith(f"{name}: "):
        of_slice = (*packed.shape[:-3], *packed.shape[-2:])
        text = text.replace(str(of_slice), str(tuple(packed.shape)))
    if name == "qkv":
        text = _LENGTHS.sub(r"\1", text)
    return error if text == str(error) else type(error)(text)
