"""Not part of this package; the import says what to use instead."""

from flash_attn import _names

raise _names.missing(__name__)
