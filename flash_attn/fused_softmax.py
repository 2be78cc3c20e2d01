"""Not part of this package; the import says what to use instead."""

from flash_attn.compat.names import missing

raise missing(__name__)
