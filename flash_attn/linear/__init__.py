"""Linear attention: gated linear attention, its relatives with scalar decays, Mamba 2's scan and
the gated delta rule, with the names and keywords of flash-linear-attention and mamba_ssm.

The compiled kernels serve what ``flash_attn.linear._kernels`` lists; torch operations serve the
rest, on any device.
"""

from flash_attn.linear.core import chunk_scan, recurrent_scan, recurrent_step
from flash_attn.linear.gated_delta_rule import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from flash_attn.linear.gla import chunk_gla, fused_chunk_gla, fused_recurrent_gla
from flash_attn.linear.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn
from flash_attn.linear.mamba import mamba_chunk_scan_combined, selective_state_update
from flash_attn.linear.simple_gla import (
    chunk_lightning_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
)

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_scan",
    "chunk_simple_gla",
    "fused_chunk_gla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "mamba_chunk_scan_combined",
    "recurrent_scan",
    "recurrent_step",
    "selective_state_update",
]
