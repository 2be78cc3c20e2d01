"""Linear attention: gated linear attention, its relatives with scalar decays, Mamba 2's scan and
the gated delta rule, with the names and keywords of flash-linear-attention and mamba_ssm.

The compiled kernels serve what ``flash_attn.linear._kernels`` lists; torch operations serve the
rest, on any device.
"""

from flash_attn.linear.conv import ShortConvolution, causal_conv1d_fn, causal_conv1d_update
from flash_attn.linear.core import chunk_scan, recurrent_scan, recurrent_step
from flash_attn.linear.gated_delta_rule import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_step,
)
from flash_attn.linear.gla import chunk_gla, fused_chunk_gla, fused_recurrent_gla
from flash_attn.linear.layers import GatedLinearAttention, LinearCache
from flash_attn.linear.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn
from flash_attn.linear.mamba import mamba_chunk_scan_combined, selective_state_update
from flash_attn.linear.mamba_block import mamba_split_conv1d_scan_combined
from flash_attn.linear.norm import FusedRMSNormGated, RMSNorm
from flash_attn.linear.serve import serve_fla
from flash_attn.linear.simple_gla import (
    chunk_lightning_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
)

__all__ = [
    "FusedRMSNormGated",
    "GatedLinearAttention",
    "LinearCache",
    "RMSNorm",
    "ShortConvolution",
    "causal_conv1d_fn",
    "causal_conv1d_update",
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
    "mamba_split_conv1d_scan_combined",
    "recurrent_gated_delta_rule_step",
    "recurrent_scan",
    "recurrent_step",
    "selective_state_update",
    "serve_fla",
]
