"""The layer of gated linear attention (Yang et al. 2024), with fla's arguments and parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.linear._checks import one_of
from flash_attn.linear.conv import ShortConvolution
from flash_attn.linear.gla import chunk_gla, fused_recurrent_gla
from flash_attn.linear.norm import FusedRMSNormGated, RMSNorm

__all__ = ["GatedLinearAttention", "LinearCache"]

_MODES = ("chunk", "fused_recurrent", "fused_chunk")
_ACTIVATIONS = {
    "swish": F.silu, "silu": F.silu, "relu": F.relu, "gelu": F.gelu, "sigmoid": torch.sigmoid,
    "elu": F.elu, "identity": nn.Identity(),
}  # fmt: skip
# Up to as many tokens the recurrent function takes a call, whatever the mode.
_FEW_TOKENS = 64


class LinearCache:
    """The states of a model's layers between calls: ``past_key_values`` of the layer.

    By layer index, the recurrent state fp32 [B, H, K, V], and the convolutions' last inputs
    [B, D, W] of q, k and v, or None without convolutions.
    """

    def __init__(self) -> None:
        """Empty: each layer's first call begins from zeros."""
        self.recurrent: dict[int, Tensor] = {}
        self.conv: dict[int, tuple[Tensor, Tensor, Tensor] | None] = {}


class GatedLinearAttention(nn.Module):
    """Projections, short convolutions, gated linear attention, norm, output gate and projection.

    Arguments:
        mode: "chunk", "fused_recurrent" or "fused_chunk", which is "chunk"; a call of up to 64
            tokens is recurrent.
        hidden_size: of the layer's input and output.
        expand_k, expand_v: all heads of k, and of v, have hidden_size times these columns.
        num_heads, num_kv_heads: heads of q, and of k, v and the gates; None is num_heads.
        feature_map: what q and k go through, by name, or None.
        use_short_conv, conv_size, conv_bias: convolutions of q, k and v over conv_size tokens.
        use_output_gate, gate_fn: the output is multiplied by gate_fn of a projection.
        elementwise_affine, norm_eps, fuse_norm: of the norm of each head's output; fused or not,
            it computes the same, and names its parameters as fla does.
        gate_logit_normalizer: log gates are the logsigmoid of a projection, divided by this.
        gate_low_rank_dim: rank of that projection.
        clamp_min: least log gate, or None.
        layer_idx: where the layer's states are in a cache.
    """

    mode: str
    hidden_size: int
    layer_idx: int | None
    num_heads: int
    num_kv_heads: int
    num_kv_groups: int
    key_dim: int
    value_dim: int
    key_dim_per_group: int
    value_dim_per_group: int
    head_k_dim: int
    head_v_dim: int
    feature_map: Callable[[Tensor], Tensor] | None
    use_short_conv: bool
    use_output_gate: bool
    gate_logit_normalizer: int
    clamp_min: float | None
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    g_proj: nn.Linear
    q_conv1d: ShortConvolution
    k_conv1d: ShortConvolution
    v_conv1d: ShortConvolution
    gk_proj: nn.Sequential
    o_proj: nn.Linear
    fuse_norm_and_gate: bool
    g_norm_swish_gate: FusedRMSNormGated
    g_norm: RMSNorm
    gate_fn: Callable[[Tensor], Tensor]

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ):
        """Arguments: see the class."""
        super().__init__()
        one_of("mode", mode, _MODES)
        one_of("gate_fn", gate_fn, tuple(_ACTIVATIONS))
        one_of("feature_map", feature_map, (None, *_ACTIVATIONS))
        self.mode, self.hidden_size, self.layer_idx = mode, hidden_size, layer_idx
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: got {num_kv_heads}; it must divide {num_heads}")
        self.num_kv_groups = num_heads // self.num_kv_heads
        self.key_dim, self.value_dim = int(hidden_size * expand_k), int(hidden_size * expand_v)
        for name, columns in (("expand_k", self.key_dim), ("expand_v", self.value_dim)):
            if columns % num_heads:
                raise ValueError(
                    f"{name}: got {columns} columns; a multiple of {num_heads} is needed"
                )
        self.key_dim_per_group = self.key_dim // self.num_kv_groups
        self.value_dim_per_group = self.value_dim // self.num_kv_groups
        self.head_k_dim, self.head_v_dim = self.key_dim // num_heads, self.value_dim // num_heads
        self.feature_map = None if feature_map is None else _ACTIVATIONS[feature_map]
        self.use_short_conv, self.use_output_gate = use_short_conv, use_output_gate
        self.gate_logit_normalizer, self.clamp_min = gate_logit_normalizer, clamp_min

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim_per_group, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim_per_group, bias=False)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias, "silu")
            self.k_conv1d = ShortConvolution(self.key_dim_per_group, conv_size, conv_bias, "silu")
            self.v_conv1d = ShortConvolution(self.value_dim_per_group, conv_size, conv_bias, "silu")
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, self.key_dim_per_group, bias=True),
        )
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self.fuse_norm_and_gate = gate_fn == "swish" and fuse_norm and use_output_gate
        if self.fuse_norm_and_gate:
            self.g_norm_swish_gate = FusedRMSNormGated(
                self.head_v_dim, elementwise_affine, norm_eps
            )
        else:
            self.g_norm = RMSNorm(self.head_v_dim, elementwise_affine, norm_eps)
            self.gate_fn = _ACTIVATIONS[gate_fn]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: LinearCache | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None, LinearCache | None]:
        """hidden_states [B, T, hidden_size] -> the same, None, and ``past_key_values``.

        attention_mask: [B, T], 0 where there is padding, whose outputs are zeros.
        past_key_values: states that the call begins from, and with ``use_cache`` leaves there.
        cu_seqlens: [N + 1], packed sequences of a B of 1.

        Raises ValueError for a mask that is not [B, T], for one beside ``cu_seqlens``, and for a
        cache without ``layer_idx``.
        """
        batch, seqlen, _ = hidden_states.shape
        if past_key_values is not None and self.layer_idx is None:
            raise ValueError("layer_idx: needed for a cache")
        indices = None
        if attention_mask is not None and seqlen > 1:
            if attention_mask.shape != (batch, seqlen) or cu_seqlens is not None:
                raise ValueError(
                    f"attention_mask: got {tuple(attention_mask.shape)}; [B, T], "
                    f"({batch}, {seqlen}), without cu_seqlens is needed"
                )
            packed, indices, cu_seqlens, *_ = unpad_input(hidden_states, attention_mask)
            hidden_states = packed[None]
        o = self._attend(hidden_states, past_key_values, use_cache, cu_seqlens)
        if indices is not None:
            o = pad_input(o[0], indices, batch, seqlen)
        return o, None, past_key_values

    def _attend(
        self, x: Tensor, cache: LinearCache | None, use_cache: bool, cu_seqlens: Tensor | None
    ) -> Tensor:
        layer = -1 if self.layer_idx is None else self.layer_idx
        state = None if cache is None else cache.recurrent.get(layer)
        q, k, v = self._projected(x, cache, layer, use_cache, cu_seqlens)
        gk = F.logsigmoid(self.gk_proj(x).float()) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            gk = gk.clamp_min(self.clamp_min)
        q, k = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k))
        gk, v = gk.unflatten(-1, (-1, self.head_k_dim)), v.unflatten(-1, (-1, self.head_v_dim))
        if self.num_kv_groups > 1:
            k, v, gk = (t.repeat_interleave(self.num_kv_groups, dim=2) for t in (k, v, gk))
        if self.feature_map is not None:
            q, k = self.feature_map(q), self.feature_map(k)
        wants = use_cache and cache is not None
        rest = dict(initial_state=state, output_final_state=wants, cu_seqlens=cu_seqlens)
        if self.mode == "fused_recurrent" or x.shape[1] <= _FEW_TOKENS:
            o, final = fused_recurrent_gla(q, k, v, gk=gk, **rest)
        else:
            o, final = chunk_gla(q, k, v, gk, **rest)
        if wants:
            cache.recurrent[layer] = final
        return self.o_proj(self._gated(o, x).flatten(-2))

    def _projected(
        self, x: Tensor, cache: LinearCache | None, layer: int, use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """q, k and v, through their convolutions."""
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if not self.use_short_conv:
            return projected
        before = None if cache is None else cache.conv.get(layer)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        wants = use_cache and cache is not None
        found = [
            convolution(t, None, None, last, wants, cu_seqlens)
            for convolution, t, last in zip(convolutions, projected, before or (None,) * 3)
        ]
        if wants:
            cache.conv[layer] = tuple(last for _, last in found)
        return [out for out, _ in found]

    def _gated(self, o: Tensor, x: Tensor) -> Tensor:
        """o [B, T, H, V] through norm and output gate."""
        if not self.use_output_gate:
            return self.g_norm(o)
        g = self.g_proj(x).unflatten(-1, (-1, self.head_v_dim))
        if self.fuse_norm_and_gate:
            return self.g_norm_swish_gate(o, g)
        return self.g_norm(o) * self.gate_fn(g)
