"""A decoder-only transformer over bytes: RMSNorm, rotary GQA flash attention, SwiGLU.

It never sees a padded batch. Training packs sequences of any lengths end to end, ``(total, dim)``,
and ``cu_seqlens`` says where each one starts; generation appends to a KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb_qkv_
from flash_attn.ops.rms_norm import RMSNorm
from flash_attn.utils.kv_quantization import KVScales


@dataclass
class GPTConfig:
    vocab: int = 256  # bytes
    dim: int = 256
    layers: int = 4
    heads: int = 4
    heads_kv: int = 2
    hidden: int = 704
    max_seqlen: int = 1024

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


@dataclass
class Packed:
    """Sequences laid end to end."""

    tokens: Tensor  # (total,) int64
    targets: Tensor  # (total,) int64, the next byte
    cu_seqlens: Tensor  # (sequences + 1,) int32
    max_seqlen: int

    def to(self, device: torch.device) -> Packed:
        tensors = (self.tokens, self.targets, self.cu_seqlens)
        return Packed(*(t.to(device, non_blocking=True) for t in tensors), self.max_seqlen)


@dataclass
class LayerCache:
    """Keys and values of one layer: (batch, max_seqlen, heads_kv, head_dim) each.

    In 8 bits they are codes: a key is its code times k_descale, (batch, heads_kv).
    """

    k: Tensor
    v: Tensor
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        heads = config.heads + 2 * config.heads_kv
        self.qkv = nn.Linear(config.dim, heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def project(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., heads + 2 heads_kv, head_dim)"""
        return self.qkv(x).unflatten(-1, (-1, self.config.head_dim))

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        c = self.config
        return qkv.split([c.heads, c.heads_kv, c.heads_kv], dim=-2)

    def forward(self, x: Tensor, batch: Packed, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """(total, dim) -> (total, dim)"""
        qkv = apply_rotary_emb_qkv_(
            self.project(x), *rotary, num_heads_q=self.config.heads, cu_seqlens=batch.cu_seqlens
        )
        lengths = (batch.cu_seqlens,) * 2 + (batch.max_seqlen,) * 2
        out = flash_attn_varlen_func(*self.split(qkv), *lengths, causal=True)
        return self.out(out.flatten(-2))

    def decode(
        self, x: Tensor, cache: LayerCache, used: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """(batch, new, dim) -> the same; one call rotates q and k, appends k and v, and attends."""
        q, k, v = self.split(self.project(x))
        out = flash_attn_with_kvcache(
            q,
            cache.k,
            cache.v,
            k,
            v,
            *rotary,
            cache_seqlens=used,
            causal=True,
            rotary_interleaved=False,
            k_descale=cache.k_descale,
            v_descale=cache.v_descale,
        )
        return self.out(out.flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1, self.attention = RMSNorm(config.dim), Attention(config)
        self.norm2, self.mlp = RMSNorm(config.dim), SwiGLU(config)

    def forward(self, x: Tensor, attend) -> Tensor:
        x = x + attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                depth = (2 * config.layers) ** -0.5 if last else 1.0
                nn.init.normal_(weight, std=config.dim**-0.5 * depth)

        theta = 10000.0 ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.max_seqlen), theta)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotary(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, (max_seqlen, head_dim / 2)."""
        return self.cos.to(dtype), self.sin.to(dtype)

    def forward(self, batch: Packed) -> Tensor:
        """-> logits (total, vocab)"""
        x = self.embed(batch.tokens)
        rotary = self.rotary(torch.float32)
        for block in self.blocks:
            x = block(x, lambda y, block=block: block.attention(y, batch, rotary))
        return self.head(self.norm(x))

    def new_cache(
        self, batch_size: int, dtype: torch.dtype, scales: list[KVScales] | None = None
    ) -> list[LayerCache]:
        """In ``dtype``, or in 8 bits with the scales of each layer."""
        c = self.config
        shape = (batch_size, c.max_seqlen, c.heads_kv, c.head_dim)

        def empty(dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.cos.device)

        if scales is None:
            return [LayerCache(empty(dtype), empty(dtype)) for _ in self.blocks]
        fp8 = torch.float8_e4m3fn
        return [LayerCache(empty(fp8), empty(fp8), *s.descales(batch_size)) for s in scales]

    def decode(self, tokens: Tensor, cache: list[LayerCache], used: Tensor) -> Tensor:
        """(batch, new) tokens after ``used`` (batch,) cached ones -> logits (batch, new, vocab)"""
        x = self.embed(tokens)
        # One does not rotate in 8 bits: then the call casts to the dtype of its queries.
        rotary = self.rotary(cache[0].k.dtype if cache[0].k_descale is None else torch.float32)
        for block, kv in zip(self.blocks, cache, strict=True):
            attention = block.attention
            x = block(x, lambda y, a=attention, kv=kv: a.decode(y, kv, used, rotary))
        return self.head(self.norm(x))
