"""Attention over sequences longer than one GPU: context parallelism on torch.distributed.

Cut the sequence with a layout, give each rank its tokens, and call one of the four functions where
``flash_attn_func`` would stand. docs/distributed.md says which.
"""

from flash_attn.distributed.attention import (
    all_to_all_attention,
    gather_attention,
    mesh_attention,
    ring_attention,
)
from flash_attn.distributed.layout import Layout, Segment, dense_layout, packed_layout
from flash_attn.distributed.merge import merge_attention
from flash_attn.distributed.shard import position_ids, shard_sequence, unshard_sequence

__all__ = [
    "Layout",
    "Segment",
    "all_to_all_attention",
    "dense_layout",
    "gather_attention",
    "merge_attention",
    "mesh_attention",
    "packed_layout",
    "position_ids",
    "ring_attention",
    "shard_sequence",
    "unshard_sequence",
]
