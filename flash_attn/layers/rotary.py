"""Rotary position embedding for training: differentiable, dense or packed, in place where asked.

For decoding there is no need of this layer: ``flash_attn_with_kvcache`` rotates inside the call.

Su et al. 2021, "RoFormer", arXiv:2104.09864; the optional decay of the rotation's magnitude is
Sun et al. 2022, "A length-extrapolatable transformer" (xPos), arXiv:2212.10554.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from flash_attn.api import checks
from flash_attn.api.checks_scalars import flag, integer
from flash_attn.compat.functions import Applied, function_class
from flash_attn.dispatch.rotary import Parts
from flash_attn.layers._rotate import (
    differ_in_heads_alone,
    of_grouped_qkv,
    of_kv,
    of_q_and_kv,
    of_qkv,
    rotate_all,
    rotate_pair,
)
from flash_attn.ops.rotary import check_rotary, make_turn

__all__ = [
    "ApplyRotaryEmb",
    "ApplyRotaryEmbKV_",
    "ApplyRotaryEmbQKV_",
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qk",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """A quarter turn of every channel pair: (x1, x2) -> (-x2, x1). (..., d) -> (..., d)"""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """The textbook formula in the dtype of its inputs, for comparison.

    ``x`` (batch, seqlen, heads, head_dim); ``cos``, ``sin`` (seqlen, rotary_dim / 2) or
    (batch, seqlen, rotary_dim / 2).
    """
    check_rotary(x, cos, sin)
    rotary_dim = 2 * cos.shape[-1]
    if interleaved:
        cos, sin = (t.repeat_interleave(2, dim=-1).unsqueeze(-2) for t in (cos, sin))
    else:
        cos, sin = (torch.cat((t, t), dim=-1).unsqueeze(-2) for t in (cos, sin))
    turned = x[..., :rotary_dim]
    turned = turned * cos + rotate_half(turned, interleaved) * sin
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first ``rotary_dim`` channels of every head of q or k; differentiable in ``x``.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with ``cu_seqlens``.
        cos, sin: (seqlen_ro, rotary_dim / 2), rotary_dim <= head_dim; row p holds the angles of
            position p. No gradient.
        interleaved: pairs are channels (0, 1), (2, 3), ... (GPT-J); else (0, r/2), (1, r/2 + 1),
            ... (GPT-NeoX, Llama).
        inplace: overwrite ``x``. If it is a leaf that requires a gradient, go on with what is
            returned: the leaf's gradient is that of the values it had.
        seqlen_offsets: position of the first token, an int or (batch,) int32.
        cu_seqlens: (batch + 1,) int32 where sequences are packed.
        max_seqlen: accepted for the drop-in; the positions follow from ``cu_seqlens``.

    Returns:
        the shape and dtype of ``x``; the arithmetic is fp32 (fp64 for fp64).

    Raises:
        ValueError: tables that do not fit, or (int offset, CPU tensors) have too few positions.
    """
    turn = make_turn(x, cos, sin, None, None, interleaved, seqlen_offsets, cu_seqlens)
    return rotate_all(Parts, (x,), turn, flag(inplace, "inplace"))


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``apply_rotary_emb`` of q and of k, on a GPU as one kernel.

    Args:
        q, k: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with ``cu_seqlens``;
            they differ in heads alone.
        cos_k, sin_k: tables of their own for k (xPos); default ``cos``, ``sin``.
        the others: as in ``apply_rotary_emb``.

    Raises:
        ValueError: q and k of different shapes, or tables that do not fit.
    """
    checks.tensor(q, "q")
    checks.tensor(k, "k")
    if not differ_in_heads_alone(q, k):
        raise ValueError(
            f"k: got shape {tuple(k.shape)}; that of q, {tuple(q.shape)}, but for heads, is needed"
        )
    turn = make_turn(q, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, cu_seqlens)
    return rotate_pair(Parts, Parts, q, k, turn, flag(inplace, "inplace"))


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Rotate q and k in place in the packed tensor, and return it; differentiable.

    A leaf that requires a gradient is treated as by ``apply_rotary_emb``.

    Args:
        qkv: (batch, seqlen, 3, heads, d), or (batch, seqlen, heads_q + 2 * heads_k, d) with
            ``num_heads_q``; with ``cu_seqlens``, (total, ...) in place of (batch, seqlen, ...).
        cos, sin: (seqlen_ro, rotary_dim / 2).
        cos_k, sin_k: tables of their own for k (xPos); default ``cos``, ``sin``.
        interleaved, seqlen_offsets, cu_seqlens: as in ``apply_rotary_emb``.
        num_heads_q: heads of q in a GQA-packed tensor.

    Raises:
        ValueError: a tensor that is not packed as above, or tables that do not fit.
    """
    checks.tensor(qkv, "qkv")
    batch_dims = 2 if cu_seqlens is None else 1
    if num_heads_q is None and (qkv.dim() != batch_dims + 3 or qkv.shape[batch_dims] != 3):
        raise ValueError(
            f"qkv: got shape {tuple(qkv.shape)}; (..., 3, heads, head_dim) is needed, "
            "or num_heads_q with (..., heads_q + 2 * heads_k, head_dim)"
        )
    if num_heads_q is not None:
        num_heads_q = integer(num_heads_q, "num_heads_q")
        spare = qkv.shape[-2] - num_heads_q
        if qkv.dim() != batch_dims + 2 or spare <= 0 or spare % 2:
            raise ValueError(
                f"qkv: got shape {tuple(qkv.shape)} with num_heads_q {num_heads_q}; "
                "(..., num_heads_q + 2 * heads_k, head_dim) is needed"
            )
    turn = make_turn(qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, cu_seqlens)
    layout = of_qkv if num_heads_q is None else partial(of_grouped_qkv, num_heads_q)
    return rotate_all(layout, (qkv,), turn)


def _check_kv(kv: Tensor, cu_seqlens: Tensor | None) -> None:
    checks.tensor(kv, "kv")
    batch_dims = 2 if cu_seqlens is None else 1
    if kv.dim() != batch_dims + 3 or kv.shape[batch_dims] != 2:
        raise ValueError(f"kv: got shape {tuple(kv.shape)}; (..., 2, heads_k, head_dim) is needed")


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Rotate k in place in the packed ``kv`` (batch, seqlen, 2, heads_k, head_dim), and return it.

    With ``cu_seqlens``, ``kv`` is (total, 2, heads_k, head_dim). Otherwise as
    ``apply_rotary_emb_qkv_``.
    """
    _check_kv(kv, cu_seqlens)
    turn = make_turn(kv, cos, sin, None, None, interleaved, seqlen_offsets, cu_seqlens)
    return rotate_all(of_kv, (kv,), turn)


ApplyRotaryEmb: Applied = function_class("ApplyRotaryEmb", apply_rotary_emb, __name__)
ApplyRotaryEmbQKV_: Applied = function_class("ApplyRotaryEmbQKV_", apply_rotary_emb_qkv_, __name__)
ApplyRotaryEmbKV_: Applied = function_class("ApplyRotaryEmbKV_", apply_rotary_emb_kv_, __name__)


_Tables = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class RotaryEmbedding(nn.Module):
    """Keeps the tables of angles and applies them to packed qkv, or to q and packed kv.

    Args:
        dim: channels of each head that are rotated (rotary_dim).
        base: wavelengths run from 2 pi to 2 pi * base.
        interleaved: see ``apply_rotary_emb``.
        scale_base: xPos: magnitudes decay with the distance at this base (512 in the paper).
        device: of the frequencies.
        pos_idx_in_fp32: compute positions times frequencies in fp32 even if the module was cast to
            16 bits, where positions past 256 would not be exact.
    """

    base: float

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
        *,
        pos_idx_in_fp32: bool = True,
    ):
        """Arguments, defaults and errors: see the class."""
        super().__init__()
        if dim <= 0 or dim % 2:
            raise ValueError(f"dim: got {dim}; an even number is needed: channels rotate in pairs")
        self.dim = dim
        self.base = float(base)
        self.interleaved: bool = flag(interleaved, "interleaved")
        self.scale_base = scale_base
        self.pos_idx_in_fp32: bool = flag(pos_idx_in_fp32, "pos_idx_in_fp32")
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", self._compute_scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def reset_parameters(self) -> None:
        """Fill the buffers, which no checkpoint has, after ``to_empty``."""
        self.inv_freq.copy_(self._compute_inv_freq(self.inv_freq.device))
        if self.scale is not None:
            self.scale.copy_(self._compute_scale(self.scale.device))

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        channel = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (channel / self.dim)

    def _compute_scale(self, device: torch.device | str | None = None) -> Tensor | None:
        if self.scale_base is None:
            return None
        channel = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return (channel + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(
        self,
        seqlen: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make sure that the tables hold ``seqlen`` positions on ``device`` in ``dtype``."""
        device = torch.device(device) if device is not None else self.inv_freq.device
        dtype = dtype or torch.float32
        cached = self._cos_cached
        fits = (
            cached is not None
            and seqlen <= self._seq_len_cached
            and cached.device == device
            and cached.dtype == dtype
        )
        if not fits:
            self._seq_len_cached = seqlen
            # Tables made in inference mode could not be saved for a backward pass later.
            with torch.inference_mode(False):
                tables = self._make_tables(seqlen, device, dtype)
            self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = tables

    def _make_tables(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> _Tables:
        angles = self._angles(seqlen, device)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            return cos.to(dtype), sin.to(dtype), None, None
        # q grows and k shrinks with its position, so their product depends on the distance alone.
        position = torch.arange(seqlen, device=device, dtype=torch.float32) - seqlen // 2
        scale = self.scale.to(device).float() ** (position / self.scale_base).unsqueeze(-1)
        tables = (cos * scale, sin * scale, cos / scale, sin / scale)
        return tuple(table.to(dtype) for table in tables)

    def _angles(self, seqlen: int, device: torch.device) -> Tensor:
        """(seqlen, dim / 2): position times frequency."""
        if not self.pos_idx_in_fp32:
            position = torch.arange(seqlen, device=device, dtype=self.inv_freq.dtype)
            return torch.outer(position, self.inv_freq.to(device)).float()
        # A cast of the whole model may have rounded the buffer.
        exact = self.inv_freq.dtype == torch.float32
        inv_freq = self.inv_freq.to(device) if exact else self._compute_inv_freq(device)
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        return torch.outer(position, inv_freq)

    def _tables(
        self, positions: int | None, device: torch.device, dtype: torch.dtype, keep: bool
    ) -> _Tables:
        """cos, sin, and those of k (xPos) or None: at least ``positions`` rows, or those there are.

        Not kept, they are part of the traced program: an exported one has none of the module's, and
        a compiled one may not know the length, so it could not compare it with that of the tables.
        """
        if positions is not None and not keep:
            torch._check(positions >= 0)
            return self._make_tables(positions, device, dtype)
        if positions is not None:
            self._update_cos_sin_cache(positions, device, dtype)
        if self._cos_cached is None:
            raise ValueError("seqlen_offset is a tensor: pass max_seqlen to size the tables")
        return self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | Tensor | None = None,
        num_heads_q: int | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place.

        Args:
            qkv: packed (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads_q + 2 *
                heads_k, head_dim) with ``num_heads_q``; with ``kv`` it is q (batch, seqlen, heads,
                head_dim). With ``cu_seqlens``, (total, ...) in place of (batch, seqlen, ...).
            kv: (batch, seqlen, 2, heads_k, head_dim), or None.
            seqlen_offset: position of the first token, an int or (batch,).
            max_seqlen: positions to prepare; needed with a tensor ``seqlen_offset`` and with
                ``cu_seqlens`` for a table of the right size without a synchronisation.

        Returns:
            qkv, or (q, kv).
        """
        checks.tensor(qkv, "qkv")
        seqlen = qkv.shape[0] if cu_seqlens is not None else qkv.shape[1]
        positions = None
        if max_seqlen is not None:
            positions = max_seqlen.item() if isinstance(max_seqlen, Tensor) else max_seqlen
        elif not isinstance(seqlen_offset, Tensor):
            positions = seqlen + seqlen_offset
        cos, sin, cos_k, sin_k = self._tables(
            positions, qkv.device, qkv.dtype, keep=not torch.compiler.is_compiling()
        )
        place = {
            "interleaved": self.interleaved,
            "seqlen_offsets": seqlen_offset,
            "cu_seqlens": cu_seqlens,
        }
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, num_heads_q=num_heads_q, **place
            )
        _check_kv(kv, cu_seqlens)
        if differ_in_heads_alone(qkv, kv.select(-3, 0)):
            turn = make_turn(qkv, cos, sin, cos_k, sin_k, **place)
            return rotate_pair(of_q_and_kv, of_kv, qkv, kv, turn, inplace=True)
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **place)
        if cos_k is not None:
            cos, sin = cos_k, sin_k
        return q, apply_rotary_emb_kv_(kv, cos, sin, **place)
