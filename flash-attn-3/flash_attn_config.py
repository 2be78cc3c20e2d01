"""``flash_attn_3.flash_attn_config`` at the top, where programs look for it."""

from flash_attn_3.flash_attn_config import CONFIG, show

__all__ = ["CONFIG", "show"]
