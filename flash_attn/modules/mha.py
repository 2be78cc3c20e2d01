"""Multi-head attention with its projections, rotary embedding and KV cache.

Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245; ALiBi:
Press et al. 2022, arXiv:2108.12409.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.call import Window
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.modules._cached_attention import CachedAttention
from flash_attn.modules.inner_attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
)
from flash_attn.ops.fused_dense import ColumnParallelLinear, RowParallelLinear
from flash_attn.utils.distributed import get_dim_for_local_rank

if TYPE_CHECKING:
    from flash_attn.utils.generation import InferenceParams

__all__ = [
    "MHA",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "LinearResidual",
    "ParallelMHA",
    "SelfAttention",
    "get_alibi_slopes",
]


def get_alibi_slopes(nheads: int) -> list[float]:
    """ALiBi slopes: 2**(-8 i / n) for n heads, a power of two.

    For other counts the paper takes those of the power of two below, then every second one of the
    power of two above.
    """
    below = 2 ** math.floor(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / below) for i in range(nheads - below)]


class LinearResidual(nn.Linear):
    """``nn.Linear`` that also returns its input: (out, x)."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(input), input


class MHA(CachedAttention):
    """Multi-head self- or cross-attention.

    Args:
        embed_dim: width of the input and the output; each head has embed_dim / num_heads channels.
        num_heads, num_heads_kv: heads of q, and of k and v (default: the same).
        cross_attn: keys and values come from ``x_kv``.
        qkv_proj_bias, out_proj_bias: whether the projections have a bias.
        dropout: of the attention probabilities, in training mode.
        softmax_scale: default 1 / sqrt(head_dim).
        causal: bottom-right aligned.
        layer_idx: key of this layer's cache in ``inference_params``; needed to generate.
        dwconv: a causal depthwise convolution of width 3 after the projections (Primer,
            arXiv:2109.08668): ``dwconv_qkv``, or ``dwconv_q`` and ``dwconv_kv`` for grouped heads
            and cross attention.
        rotary_emb_dim: channels of each head that are rotated; 0 for none.
        rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: see ``RotaryEmbedding``.
        use_alibi, window_size: only with ``use_flash_attn``.
        fused_bias_fc: accepted for the drop-in; torch's linear adds its bias in one call anyway.
        use_flash_attn: flash attention, else the standard formula.
        return_residual: forward returns (out, x).
        checkpointing: recompute the attention in backward.
        device, dtype: of the parameters.

    Raises:
        ValueError: head counts that do not divide, or ALiBi or a window without flash attention.
    """

    rotary_emb: RotaryEmbedding
    Wq: nn.Linear
    Wkv: nn.Linear
    inner_attn: FlashSelfAttention | SelfAttention
    inner_cross_attn: FlashCrossAttention | CrossAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Window = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: got {embed_dim}; a multiple of num_heads, {num_heads}, is needed"
            )
        if num_heads % num_heads_kv:
            raise ValueError(
                f"num_heads: got {num_heads}; a multiple of num_heads_kv, {num_heads_kv}, is needed"
            )
        if not use_flash_attn and (use_alibi or tuple(window_size) != (-1, -1)):
            raise ValueError("use_alibi and window_size need use_flash_attn=True")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads_kv
        self.head_dim: int = embed_dim // num_heads
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing
        where = {"device": device, "dtype": dtype}

        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                scale_base=rotary_emb_scale_base,
                interleaved=rotary_emb_interleaved,
                device=device,
            )
        kv_dim = 2 * self.head_dim * num_heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **where)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **where)
        else:
            self.Wqkv: nn.Linear = self._make_wqkv(embed_dim + kv_dim, qkv_proj_bias, where)
        if dwconv and (cross_attn or num_heads != num_heads_kv):
            self.dwconv_q: nn.Conv1d = self._depthwise(embed_dim, where)
            self.dwconv_kv: nn.Conv1d = self._depthwise(kv_dim, where)
        elif dwconv:
            self.dwconv_qkv: nn.Conv1d = self._depthwise(embed_dim + kv_dim, where)

        options = {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        if use_flash_attn:
            slopes = get_alibi_slopes(num_heads) if use_alibi else None
            options["window_size"] = tuple(window_size)
            options["alibi_slopes"] = (
                None if slopes is None else torch.tensor(slopes, device=device)
            )
        self.inner_attn = (FlashSelfAttention if use_flash_attn else SelfAttention)(**options)
        self.inner_cross_attn = (FlashCrossAttention if use_flash_attn else CrossAttention)(
            **options
        )
        self.out_proj: nn.Linear = self._make_out_proj(out_proj_bias, where)

    def _make_wqkv(self, features: int, bias: bool, where: dict) -> nn.Linear:
        return nn.Linear(self.embed_dim, features, bias=bias, **where)

    def _make_out_proj(self, bias: bool, where: dict) -> nn.Linear:
        return nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **where)

    @staticmethod
    def _depthwise(channels: int, where: dict) -> nn.Conv1d:
        return nn.Conv1d(channels, channels, kernel_size=3, padding=2, groups=channels, **where)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Tensor | slice | None = None,
        inference_params: InferenceParams | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            x: (batch, seqlen, embed_dim), or (total, embed_dim) with ``cu_seqlens``.
            x_kv: (batch, seqlen_k, embed_dim), for cross attention (default x).
            key_padding_mask: (batch, seqlen) bool, True where a token is used. With flash attention
                the used tokens are packed first, and the rows of the others come out 0.
            cu_seqlens, max_seqlen: packed sequences; needs ``use_flash_attn``.
            mixer_subset: index into the sequence dimension of x; only these queries are computed
                (cross attention).
            inference_params: an ``InferenceParams``: append to this layer's cache and attend to it.
            **kwargs: for the inner attention, such as ``cu_seqlens_k`` and ``max_seqlen_k``.

        Returns:
            the shape of x (of the subset), or (out, x) with ``return_residual``.
        """
        self._check_shape(x, packed=cu_seqlens is not None)
        self._check_call(
            x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params
        )
        if self.use_flash_attn and key_padding_mask is not None:
            out = self._forward_padded(x, key_padding_mask, kwargs)
            return (out, x) if self.return_residual else out
        if self.use_flash_attn:
            kwargs |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        else:
            kwargs |= {"key_padding_mask": key_padding_mask}

        if self.cross_attn:
            q, kv = self._project_cross(x, x_kv, mixer_subset)
        else:
            qkv = self._project_self(x)
            q, kv = self._split(qkv)
        if inference_params is not None:
            context = self._attend_cache(q, kv, inference_params)
        elif self.cross_attn:
            if self.rotary_emb_dim > 0:
                q, kv = self.rotary_emb(q, kv, max_seqlen=max(q.shape[1], kv.shape[1]))
            context = self._run(self.inner_cross_attn, q, kv, **kwargs)
        else:
            context = self._attend_self(qkv, **kwargs)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _check_shape(self, x: Tensor, packed: bool) -> None:
        if x.dim() == (2 if packed else 3) and x.shape[-1] == self.embed_dim:
            return
        layout = f"(total, {self.embed_dim})" if packed else f"(batch, seqlen, {self.embed_dim})"
        hint = "" if packed else "; packed sequences, in 2 dimensions, come with cu_seqlens"
        raise ValueError(f"x: got shape {tuple(x.shape)}; {layout} is needed{hint}")

    def _check_call(
        self, x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params
    ) -> None:
        if cu_seqlens is not None and (max_seqlen is None or not self.use_flash_attn):
            raise ValueError("cu_seqlens needs max_seqlen and use_flash_attn=True")
        if cu_seqlens is not None and key_padding_mask is not None:
            raise ValueError(
                "cu_seqlens and key_padding_mask both given; packed rows have no padding"
            )
        if not self.cross_attn and (x_kv is not None or mixer_subset is not None):
            raise ValueError("x_kv and mixer_subset need cross_attn=True")
        if self.use_flash_attn and self.cross_attn and key_padding_mask is not None:
            raise ValueError(
                "key_padding_mask with flash cross attention: pack x and x_kv with unpad_input and "
                "pass cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k"
            )
        if self.cross_attn and self.rotary_emb_dim > 0 and cu_seqlens is not None:
            raise NotImplementedError("rotary embedding with packed cross attention")
        if self.dwconv and cu_seqlens is not None:
            raise NotImplementedError("dwconv with cu_seqlens would mix neighbouring sequences")
        if inference_params is not None:
            if self.dwconv:
                raise NotImplementedError("dwconv with inference_params: its state is not cached")
            if self.layer_idx is None:
                raise ValueError("inference_params needs layer_idx, the key of this layer's cache")
            if key_padding_mask is not None or cu_seqlens is not None:
                raise ValueError(
                    "inference_params with key_padding_mask or cu_seqlens: use lengths_per_sample"
                )

    def _forward_padded(self, x: Tensor, key_padding_mask: Tensor, kwargs: dict) -> Tensor:
        tokens, indices, cu_seqlens, max_seqlen, _ = unpad_input(x, key_padding_mask)
        out = self.forward(tokens, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, **kwargs)
        out = out[0] if self.return_residual else out
        return pad_input(out, indices, *x.shape[:2])

    def _conv(self, x: Tensor, name: str) -> Tensor:
        """The causal convolution over (batch, seqlen, channels), where there is one."""
        if not self.dwconv:
            return x
        return getattr(self, name)(x.transpose(1, 2))[..., :-2].transpose(1, 2).contiguous()

    def _project_self(self, x: Tensor) -> Tensor:
        """(..., embed_dim) -> (..., heads + 2 * heads_kv, d)"""
        qkv = self.Wqkv(x)
        if not self.dwconv or self.num_heads == self.num_heads_kv:
            qkv = self._conv(qkv, "dwconv_qkv")
        else:
            q, kv = qkv.tensor_split([self.embed_dim], dim=-1)
            qkv = torch.cat((self._conv(q, "dwconv_q"), self._conv(kv, "dwconv_kv")), dim=-1)
        return qkv.unflatten(-1, (-1, self.head_dim))

    def _project_cross(self, x, x_kv, mixer_subset) -> tuple[Tensor, Tensor]:
        q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
        kv = self.Wkv(x if x_kv is None else x_kv)
        q = self._conv(q, "dwconv_q").unflatten(-1, (-1, self.head_dim))
        kv = self._conv(kv, "dwconv_kv").unflatten(-1, (2, self.num_heads_kv, self.head_dim))
        return q, kv

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """(..., heads + 2 * heads_kv, d) -> (..., heads, d), (..., 2, heads_kv, d), as views."""
        q = qkv.narrow(-2, 0, self.num_heads)
        kv = qkv.narrow(-2, self.num_heads, 2 * self.num_heads_kv)
        return q, kv.unflatten(-2, (2, self.num_heads_kv))

    def _run(self, attention: nn.Module, *args, **kwargs) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(attention, *args, use_reentrant=False, **kwargs)
        return attention(*args, **kwargs)

    def _attend_self(self, qkv: Tensor, **kwargs) -> Tensor:
        if self.rotary_emb_dim > 0:
            qkv = self.rotary_emb(
                qkv,
                num_heads_q=self.num_heads,
                max_seqlen=kwargs.get("max_seqlen"),
                cu_seqlens=kwargs.get("cu_seqlens"),
            )
        if self.num_heads == self.num_heads_kv:
            qkv = qkv.unflatten(-2, (3, self.num_heads))
            return self._run(self.inner_attn, qkv, **kwargs)
        q, kv = self._split(qkv)
        return self._run(self.inner_cross_attn, q, kv, **kwargs)


class ParallelMHA(MHA):
    """Causal or full self-attention whose heads are shared out among ranks.

    Args:
        embed_dim, num_heads, num_heads_kv: of the whole layer; each rank gets whole groups of
            heads that share one of k and v. Afterwards ``num_heads`` and ``num_heads_kv`` are those
            of this rank, and ``Wqkv`` and ``out_proj`` hold its rows and columns.
        process_group: the ranks.
        sequence_parallel: as in ``ColumnParallelLinear``.

    The others are those of ``MHA``.

    Raises:
        ValueError: as ``MHA``, and fewer heads of k and v than ranks.
    """

    process_group: dist.ProcessGroup
    sequence_parallel: bool

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        process_group: dist.ProcessGroup,
        num_heads_kv: int | None = None,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Window = (-1, -1),
        use_flash_attn: bool = False,
        checkpointing: bool = False,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        # The projections are made by the constructor of MHA, and are this rank's.
        """Arguments, defaults and errors: see the class."""
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        super().__init__(
            embed_dim, num_heads, num_heads_kv, qkv_proj_bias=qkv_proj_bias,
            out_proj_bias=out_proj_bias, dropout=dropout, softmax_scale=softmax_scale,
            causal=causal, layer_idx=layer_idx, rotary_emb_dim=rotary_emb_dim,
            rotary_emb_base=rotary_emb_base, rotary_emb_scale_base=rotary_emb_scale_base,
            rotary_emb_interleaved=rotary_emb_interleaved, use_alibi=use_alibi,
            window_size=window_size, use_flash_attn=use_flash_attn, checkpointing=checkpointing,
            device=device, dtype=dtype,
        )  # fmt: skip
        self._keep_own_heads()

    def _group(self) -> int:
        """Heads of q to one of k and v."""
        return self.num_heads // self.num_heads_kv

    def _make_wqkv(self, features: int, bias: bool, where: dict) -> nn.Linear:
        together = (self._group() + 2) * self.head_dim
        return ColumnParallelLinear(
            self.embed_dim, features, self.process_group, bias=bias,
            sequence_parallel=self.sequence_parallel, multiple_of=together, **where,
        )  # fmt: skip

    def _make_out_proj(self, bias: bool, where: dict) -> nn.Linear:
        return RowParallelLinear(
            self.embed_dim, self.embed_dim, self.process_group, bias=bias,
            sequence_parallel=self.sequence_parallel,
            multiple_of=self._group() * self.head_dim, **where,
        )  # fmt: skip

    def _keep_own_heads(self) -> None:
        world, rank = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
        group, heads_kv = self._group(), self.num_heads_kv
        if heads_kv < world:
            raise ValueError(f"{heads_kv} heads of k and v; each of the {world} ranks needs one")
        before = sum(get_dim_for_local_rank(heads_kv, world, i) for i in range(rank))
        self.num_heads_kv: int = get_dim_for_local_rank(heads_kv, world, rank)
        self.num_heads: int = group * self.num_heads_kv
        for attention in (self.inner_attn, self.inner_cross_attn):
            slopes = getattr(attention, "alibi_slopes", None)
            if slopes is not None:
                own = slopes.narrow(0, group * before, self.num_heads)
                attention.alibi_slopes = own.clone()

    def forward(
        self,
        x: Tensor,
        seqlen: int | None = None,
        inference_params: InferenceParams | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend with this rank's heads and sum over the ranks.

        Args:
            x: (batch, seqlen, embed_dim), or with ``seqlen`` (batch · seqlen, embed_dim); with
                ``cu_seqlens`` (total, embed_dim). With sequence_parallel, this rank's share of
                dimension 0.
            seqlen: length of the sequences that lie flat in dimension 0.
            inference_params, cu_seqlens, max_seqlen: as in ``MHA``.

        Returns:
            the shape of x.
        """
        self._check_call(None, None, cu_seqlens, max_seqlen, None, inference_params)
        if cu_seqlens is not None:
            kwargs |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        qkv = self.Wqkv(x).unflatten(-1, (-1, self.head_dim))
        is_flat = seqlen is not None
        if is_flat:
            qkv = qkv.unflatten(0, (-1, seqlen))
        if inference_params is not None:
            context = self._attend_cache(*self._split(qkv), inference_params)
        else:
            context = self._attend_self(qkv, **kwargs)
        context = context.flatten(-2)
        return self.out_proj(context.flatten(0, 1) if is_flat else context)
