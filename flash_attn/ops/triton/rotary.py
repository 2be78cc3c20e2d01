"""``apply_rotary`` under the name that clients import."""

from typing import TYPE_CHECKING

from flash_attn.compat.names import refusing
from flash_attn.ops.rotary import apply_rotary

__all__ = ["apply_rotary"]

if not TYPE_CHECKING:
    __getattr__ = refusing(__name__)
