"""Models of ``transformers`` on a machine without a GPU.

Where there is a GPU ``attn_implementation="flash_attention_2"`` takes this package by itself.
Without one ``transformers`` refuses, for the package whose name this is has kernels alone.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allow_cpu"]


def allow_cpu() -> None:
    """Makes ``transformers`` accept this package on the CPU; to be called before a model is made.

    Its other questions, for the distribution ``flash-attn`` and its version, are asked as before.
    Where there is a GPU nothing changes.

    Raises:
        ImportError: this release of transformers asks in another way.
    """
    if torch.cuda.is_available():
        return
    import transformers
    from transformers import modeling_flash_attention_utils as client
    from transformers.utils import is_flash_attn_greater_or_equal

    def is_flash_attn_2_available(*args: Any, **kwargs: Any) -> bool:
        return is_flash_attn_greater_or_equal("2.3.3")

    needs = getattr(client, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).get(2, {})
    asked = {"general_availability_check", "supported_devices"}
    if not asked <= needs.keys() or not hasattr(client, "is_flash_attn_2_available"):
        raise ImportError(
            f"flash_attn: transformers {transformers.__version__} asks for a GPU in a way that "
            "allow_cpu does not know; releases from 5.17 on are known"
        )
    if any(device == "cpu" for _, device in needs["supported_devices"]):
        return
    client.is_flash_attn_2_available = is_flash_attn_2_available
    needs["general_availability_check"] = is_flash_attn_2_available
    needs["supported_devices"] = ((lambda: True, "cpu"), *needs["supported_devices"])
