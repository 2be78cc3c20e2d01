"""Rotary position embedding for training: differentiable, dense or packed, in place where asked.

For decoding there is no need of this layer: ``flash_attn_with_kvcache`` rotates inside the call.

Su et al. 2021, "RoFormer", arXiv:2104.09864; the optional decay of the rotation's magnitude is
Sun et al. 2022, "A length-extrapolatable transformer" (xPos), arXiv:2212.10554.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_attn.ops.rotary import check_rotary, rotary_angles, rotate_into

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
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


class _Rotate(torch.autograd.Function):
    """Rotation of one tensor. Keeps the angles and not x: the gradient is the opposite rotation."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved, inplace):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        if inplace:
            ctx.mark_dirty(x)
        out = x if inplace else x.clone()
        rotate_into(out, x, cos, sin, interleaved)
        return out

    @staticmethod
    def backward(ctx, dout):
        cos, sin = ctx.saved_tensors
        # Not in place even for an in-place forward: `dout` may be a tensor of the caller's.
        dx = dout.clone()
        rotate_into(dx, dout, cos, sin, ctx.interleaved, conjugate=True)
        return dx, None, None, None, None


def _split_packed(packed: Tensor, num_heads_q: int | None) -> list[Tensor]:
    """Views of the q (or nothing) and k heads of a packed tensor; v is left out.

    (..., 3, heads, d) or (..., heads_q + 2 * heads_k, d) -> [q, k]; (..., 2, heads, d) -> [k].
    """
    if num_heads_q is None:
        parts = packed.unbind(dim=-3)
        return list(parts[:-1])
    num_heads_k = (packed.shape[-2] - num_heads_q) // 2
    q, k, _ = packed.split([num_heads_q, num_heads_k, num_heads_k], dim=-2)
    return [q, k]


class _RotatePacked(torch.autograd.Function):
    """Rotation of the q and k parts of one packed tensor, in place."""

    @staticmethod
    def forward(ctx, packed, num_heads_q, interleaved, *angles):
        ctx.mark_dirty(packed)
        ctx.save_for_backward(*angles)
        ctx.num_heads_q, ctx.interleaved = num_heads_q, interleaved
        _RotatePacked.rotate(packed, packed, num_heads_q, interleaved, angles, conjugate=False)
        return packed

    @staticmethod
    def backward(ctx, dout):
        dpacked = dout.clone()
        _RotatePacked.rotate(
            dpacked, dout, ctx.num_heads_q, ctx.interleaved, ctx.saved_tensors, conjugate=True
        )
        return dpacked, None, None, *(None for _ in ctx.saved_tensors)

    @staticmethod
    def rotate(out, packed, num_heads_q, interleaved, angles, conjugate):
        parts = zip(
            _split_packed(out, num_heads_q), _split_packed(packed, num_heads_q), strict=True
        )
        for i, (out_part, part) in enumerate(parts):
            # k turns by the angles of q unless it has its own. (Handing the same tensors over
            # twice would stop torch.compile.)
            cos, sin = angles[2 * i : 2 * i + 2] or angles[:2]
            rotate_into(out_part, part, cos, sin, interleaved, conjugate)


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
        inplace: overwrite ``x``.
        seqlen_offsets: position of the first token, an int or (batch,) int32.
        cu_seqlens: (batch + 1,) int32 where sequences are packed.
        max_seqlen: accepted for the drop-in; the positions follow from ``cu_seqlens``.

    Returns:
        the shape and dtype of ``x``; the arithmetic is fp32 (fp64 for fp64).

    Raises:
        ValueError: tables that do not fit, or (int offset, CPU tensors) have too few positions.
    """
    check_rotary(x, cos, sin)
    cos, sin = rotary_angles(x, cos, sin, seqlen_offsets, cu_seqlens)
    return _Rotate.apply(x, cos, sin, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


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
    batch_dims = 2 if cu_seqlens is None else 1
    if num_heads_q is None and (qkv.dim() != batch_dims + 3 or qkv.shape[batch_dims] != 3):
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; expected (..., 3, heads, head_dim), "
            "or num_heads_q with (..., heads_q + 2 * heads_k, head_dim)"
        )
    if num_heads_q is not None:
        spare = qkv.shape[-2] - num_heads_q
        if qkv.dim() != batch_dims + 2 or spare <= 0 or spare % 2:
            raise ValueError(
                f"qkv has shape {tuple(qkv.shape)} and num_heads_q is {num_heads_q}; "
                "expected (..., num_heads_q + 2 * heads_k, head_dim)"
            )
    check_rotary(qkv, cos, sin)
    angles = rotary_angles(qkv, cos, sin, seqlen_offsets, cu_seqlens)
    angles_k = ()
    if cos_k is not None or sin_k is not None:
        cos_k, sin_k = (cos if cos_k is None else cos_k), (sin if sin_k is None else sin_k)
        check_rotary(qkv, cos_k, sin_k)
        angles_k = rotary_angles(qkv, cos_k, sin_k, seqlen_offsets, cu_seqlens)
    return _RotatePacked.apply(qkv, num_heads_q, interleaved, *angles, *angles_k)


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
    batch_dims = 2 if cu_seqlens is None else 1
    if kv.dim() != batch_dims + 3 or kv.shape[batch_dims] != 2:
        raise ValueError(f"kv has shape {tuple(kv.shape)}; expected (..., 2, heads_k, head_dim)")
    check_rotary(kv, cos, sin)
    angles = rotary_angles(kv, cos, sin, seqlen_offsets, cu_seqlens)
    return _RotatePacked.apply(kv, None, interleaved, *angles)


class RotaryEmbedding(nn.Module):
    """Keeps the tables of angles and applies them to packed qkv, or to q and packed kv.

    Args:
        dim: channels of each head that are rotated (rotary_dim).
        base: wavelengths run from 2 pi to 2 pi * base.
        interleaved: see ``apply_rotary_emb``.
        scale_base: xPos: magnitudes decay with the distance at this base (512 in the paper).
        pos_idx_in_fp32: compute positions times frequencies in fp32 even if the module was cast to
            16 bits, where positions past 256 would not be exact.
        device: of the frequencies.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if dim <= 0 or dim % 2:
            raise ValueError(f"dim is {dim}; the rotated channels come in pairs")
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            channel = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
            scale = (channel + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        channel = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (channel / self.dim)

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
                self._make_tables(seqlen, device, dtype)

    def _make_tables(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> None:
        angles = self._angles(seqlen, device)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        # q grows and k shrinks with its position, so their product depends on the distance alone.
        position = torch.arange(seqlen, device=device, dtype=torch.float32) - seqlen // 2
        scale = self.scale.to(device).float() ** (position / self.scale_base).unsqueeze(-1)
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

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

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
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
        seqlen = qkv.shape[0] if cu_seqlens is not None else qkv.shape[1]
        if max_seqlen is not None:
            self._update_cos_sin_cache(int(max_seqlen), qkv.device, qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._update_cos_sin_cache(seqlen + seqlen_offset, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None:
            raise ValueError("seqlen_offset is a tensor: pass max_seqlen to size the tables")
        place = {
            "interleaved": self.interleaved,
            "seqlen_offsets": seqlen_offset,
            "cu_seqlens": cu_seqlens,
        }
        cos_k, sin_k = self._cos_k_cached, self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, num_heads_q=num_heads_q, **place
            )
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **place)
        if cos_k is not None:
            cos, sin = cos_k, sin_k
        return q, apply_rotary_emb_kv_(kv, cos, sin, **place)
