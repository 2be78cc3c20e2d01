"""Attention without its projections: flash attention, and the standard formula beside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn.api import checks
from flash_attn.call import Window
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = ["CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "SelfAttention"]


def _checked_scale(softmax_scale: float | None) -> float | None:
    if softmax_scale is not None:
        checks.finite(softmax_scale, "softmax_scale")
    return softmax_scale


class _FlashAttention(nn.Module):
    """What the two flash modules hold in common.

    Args:
        causal: each query sees the keys up to its own position.
        softmax_scale: default 1 / sqrt(head_dim).
        attention_dropout: applied to the probabilities in training mode.
        window_size: (left, right) keys around each query's position; -1 is unbounded.
        alibi_slopes: (heads,) or (batch, heads) fp32, or None.
        deterministic: bitwise repeatable backward.
    """

    drop: nn.Dropout
    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: Window = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        self.causal: bool = checks.flag(causal, "causal")
        self.softmax_scale: float | None = _checked_scale(softmax_scale)
        checks.number(attention_dropout, "attention_dropout")
        self.drop = nn.Dropout(attention_dropout)
        self.window_size = window_size
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.deterministic: bool = checks.flag(deterministic, "deterministic")

    def _apply(self, fn, recurse: bool = True) -> nn.Module:
        """``.to(torch.bfloat16)`` leaves the slopes float32: attention takes no others."""
        slopes = self.alibi_slopes
        super()._apply(fn, recurse)
        if slopes is not None and self.alibi_slopes.dtype != slopes.dtype:
            self.alibi_slopes = slopes.to(self.alibi_slopes.device)
        return self

    def _options(self, causal: bool | None) -> dict:
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": self.alibi_slopes,
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_FlashAttention):
    """Flash attention over packed qkv; arguments as in ``FlashCrossAttention``."""

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """(batch, seqlen, 3, heads, d) -> (batch, seqlen, heads, d), or packed.

        Args:
            qkv: with ``cu_seqlens`` (total, 3, heads, d); the result is then (total, heads, d).
            causal: overrides the module's setting.
            cu_seqlens: (batch + 1,) int32.
            max_seqlen: longest sequence, with ``cu_seqlens``.
        """
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **options)
        if max_seqlen is None:
            raise ValueError("max_seqlen: got None; cu_seqlens comes with the longest sequence")
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)


class FlashCrossAttention(_FlashAttention):
    """Flash attention of q over packed kv, which may have fewer heads (GQA, MQA)."""

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """(batch, seqlen_q, heads, d), (batch, seqlen_k, 2, heads_k, d) -> shape of q, or packed.

        Args:
            q, kv: with ``cu_seqlens`` (total_q, heads, d) and (total_k, 2, heads_k, d).
            causal: overrides the module's setting.
            cu_seqlens, cu_seqlens_k: (batch + 1,) int32; for the keys default to the queries'.
            max_seqlen, max_seqlen_k: longest sequences, with ``cu_seqlens``.
        """
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **options)
        if max_seqlen is None:
            raise ValueError("max_seqlen: got None; cu_seqlens comes with the longest sequence")
        return flash_attn_varlen_kvpacked_func(
            q,
            kv,
            cu_seqlens,
            cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
            max_seqlen,
            max_seqlen if max_seqlen_k is None else max_seqlen_k,
            **options,
        )


class CrossAttention(nn.Module):
    """The standard formula, softmax(Q K^T) V, through torch; for comparison and odd devices."""

    drop: nn.Dropout

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        self.causal: bool = checks.flag(causal, "causal")
        self.softmax_scale: float | None = _checked_scale(softmax_scale)
        checks.number(attention_dropout, "attention_dropout")
        self.drop = nn.Dropout(attention_dropout)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """(batch, seqlen_q, heads, d), (batch, seqlen_k, 2, heads_k, d) -> shape of q.

        ``key_padding_mask`` (batch, seqlen_k) bool is True where a key may be seen. Causal is
        aligned to the bottom-right corner, as everywhere in this library.
        """
        causal = self.causal if causal is None else checks.flag(causal, "causal")
        k, v = kv.unbind(dim=2)
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        visible = None
        if causal and seqlen_q > 1:
            visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
            visible = visible.tril(seqlen_k - seqlen_q)
        if key_padding_mask is not None:
            keys = key_padding_mask.bool()[:, None, None, :]  # (batch, 1, 1, seqlen_k)
            visible = keys if visible is None else keys & visible
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            attn_mask=visible,
            dropout_p=self.drop.p if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)


class SelfAttention(CrossAttention):
    """The standard formula over packed qkv."""

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """(batch, seqlen, 3, heads, d) -> (batch, seqlen, heads, d)."""
        return super().forward(qkv[:, :, 0], qkv[:, :, 1:], causal, key_padding_mask)
