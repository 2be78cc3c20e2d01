"""The state that a model's layers share while it generates."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["InferenceParams"]


@dataclass
class InferenceParams:
    """What ``MHA.forward(..., inference_params=...)`` reads; any object with these fields will do.

    Attributes:
        max_seqlen: length that the caches are allocated with.
        max_batch_size: batch that they are allocated with.
        seqlen_offset: tokens already in the cache, for every sequence. The caller advances it.
        batch_size_offset: first row of the caches that this batch uses.
        key_value_memory_dict: layer_idx -> (max_batch, max_seqlen, 2, heads_kv, head_dim).
        lengths_per_sample: (batch,) int32, tokens in the cache per sequence; wins over
            ``seqlen_offset`` where given.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Tensor] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Start over with the same caches."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()
