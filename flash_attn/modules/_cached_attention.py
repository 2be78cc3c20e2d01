"""What ``MHA`` does with a KV cache: append to it, and attend to all of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_attn.api.checks_kvcache import say_there_is_no_gradient
from flash_attn.flash_attn_interface import flash_attn_with_kvcache

__all__ = ["CachedAttention"]


class CachedAttention(nn.Module):
    """The part of ``MHA`` that generates: its projections and attributes are that class's."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """An empty cache (batch_size, max_seqlen, 2, num_heads_kv, head_dim)."""
        weight = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device)

    def _attend_cache(self, q: Tensor, kv: Tensor, inference_params) -> Tensor:
        """Append kv to this layer's cache and attend to all of it: the first tokens or the next.

        q (batch, seqlen, heads, d), kv (batch, seqlen, 2, heads_kv, d) -> the shape of q.
        """
        if torch.is_grad_enabled() and (q.requires_grad or kv.requires_grad):
            say_there_is_no_gradient()
            q, kv = q.detach(), kv.detach()
        caches, first = inference_params.key_value_memory_dict, inference_params.batch_size_offset
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(
                inference_params.max_batch_size, inference_params.max_seqlen, kv.dtype
            )
        rows = slice(first, first + q.shape[0])
        cache = caches[self.layer_idx][rows]  # (batch, max_seqlen, 2, heads_kv, d)
        lengths = inference_params.lengths_per_sample
        offset = inference_params.seqlen_offset if lengths is None else lengths[rows]

        tables = {}
        if self.rotary_emb_dim > 0 and self._is_rotated_by_the_call(q):
            tables = self._rotary_tables(cache.shape[1], q)
        elif self.rotary_emb_dim > 0:
            q, kv = self.rotary_emb(q, kv, seqlen_offset=offset, max_seqlen=cache.shape[1])
        if not self.use_flash_attn:
            return self._attend_cache_standard(q, kv, cache, offset)
        attention = self.inner_cross_attn
        return flash_attn_with_kvcache(
            q,
            *cache.unbind(dim=2),
            *kv.unbind(dim=2),
            cache_seqlens=offset,
            softmax_scale=attention.softmax_scale,
            causal=attention.causal,
            window_size=attention.window_size,
            alibi_slopes=attention.alibi_slopes,
            **tables,
        )

    def _is_rotated_by_the_call(self, q: Tensor) -> bool:
        """Whether ``flash_attn_with_kvcache`` rotates as this layer does: each row of q by its own
        position. Without a causal mask it rotates all of them by that of the first, and it knows no
        tables of k's own, which xPos has."""
        if not self.use_flash_attn or self.rotary_emb.scale is not None:
            return False
        return self.inner_cross_attn.causal or q.shape[1] == 1

    def _rotary_tables(self, positions: int, like: Tensor) -> dict:
        """The rotary arguments of ``flash_attn_with_kvcache``."""
        rotary = self.rotary_emb
        # A compiled model knows how long the cache is, and makes the tables once, not every token.
        cos, sin, _, _ = rotary._tables(
            positions, like.device, like.dtype, keep=not torch.compiler.is_exporting()
        )
        return {
            "rotary_cos": cos,
            "rotary_sin": sin,
            "rotary_interleaved": rotary.interleaved,
        }

    def _attend_cache_standard(
        self, q: Tensor, kv: Tensor, cache: Tensor, offset: int | Tensor
    ) -> Tensor:
        if isinstance(offset, Tensor):
            raise NotImplementedError("lengths_per_sample needs use_flash_attn=True")
        end = offset + kv.shape[1]
        if end > cache.shape[1]:
            raise ValueError(
                f"inference_params: got room for {cache.shape[1]} tokens; {end} are needed"
            )
        cache[:, offset:end] = kv
        return self.inner_cross_attn(q, cache[:, :end])
