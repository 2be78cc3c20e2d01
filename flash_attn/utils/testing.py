"""The textbook formula of attention, and padding to try it with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_attn.compat.names import refusing

__all__ = ["attention_ref", "construct_local_mask", "generate_random_padding_mask"]


def generate_random_padding_mask(
    max_seqlen: int,
    batch_size: int,
    device: torch.device | str | None,
    mode: str = "random",
    zero_lengths: bool = False,
) -> Tensor:
    """(batch_size, max_seqlen) bool, True for the first tokens of each row.

    mode: "full", "random" (1 to max_seqlen, or from 0 with ``zero_lengths``) or "third" (of the
    upper two thirds).
    """
    if mode not in ("full", "random", "third"):
        raise ValueError(f"mode: got {mode!r}; 'full', 'random' or 'third' is needed")
    least = {"full": max_seqlen, "random": 0 if zero_lengths else 1, "third": max_seqlen // 3}[mode]
    lengths = torch.randint(least, max_seqlen + 1, (batch_size, 1), device=device)
    return torch.arange(max_seqlen, device=device) < lengths


def construct_local_mask(
    seqlen_q: int,
    seqlen_k: int,
    window_size: tuple[int | None, int | None] = (-1, -1),
    sink_token_length: int = 0,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_leftpad: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """True where a window hides a key: (seqlen_q, seqlen_k), or (batch, 1, seqlen_q, seqlen_k).

    Args:
        window_size: (left, right) around the bottom-right diagonal; None or negative is unbounded.
        sink_token_length: the first keys, which the left side does not hide.
        query_padding_mask, key_padding_mask: (batch, seqlen); the diagonal is that of used tokens.
        key_leftpad: (batch,), keys before the first one.
    """
    row = torch.arange(seqlen_q, device=device)[:, None]
    key = torch.arange(seqlen_k, device=device)
    if key_leftpad is not None:
        key = key - key_leftpad[:, None, None, None]
    used_q, used_k = (
        seqlen if mask is None else mask.sum(-1)[:, None, None, None]
        for seqlen, mask in ((seqlen_q, query_padding_mask), (seqlen_k, key_padding_mask))
    )
    if key_leftpad is not None and key_padding_mask is None:
        used_k = used_k - key_leftpad[:, None, None, None]
    distance = key - (row + used_k - used_q)
    left, right = window_size
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None and left >= 0:
        hidden = hidden | ((distance < -left) & (key >= sink_token_length))
    if right is not None and right >= 0:
        hidden = hidden | (distance > right)
    return hidden


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_leftpad: Tensor | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    causal: bool = False,
    *,
    window_size: tuple[int | None, int | None] = (-1, -1),
    sink_token_length: int = 0,
    softcap: float = 0.0,
    upcast: bool = True,
    reorder_ops: bool = False,
) -> tuple[Tensor, Tensor]:
    """``softmax(q kᵀ / sqrt(d) + bias) v`` with the whole matrix.

    Args:
        q, k, v: (batch, seqlen_q, heads, d) and (batch, seqlen_k, heads_k, d).
        query_padding_mask, key_padding_mask: (batch, seqlen) bool, True where a token is used.
        key_leftpad: (batch,).
        attn_bias: broadcastable to (batch, heads, seqlen_q, seqlen_k).
        dropout_p, dropout_mask: the mask is True where a weight is kept.
        upcast: in fp32, else in the dtype of q.
        reorder_ops: scale k in place of q: another rounding.

    Returns:
        out (batch, seqlen_q, heads, d) and the weights (batch, heads, seqlen_q, seqlen_k) before
        dropout, in the dtype of q. Rows that see no key are 0.
    """
    dtype = q.dtype
    if upcast:
        q, k, v = q.float(), k.float(), v.float()
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scale = 1.0 / math.sqrt(q.shape[-1])
    q, k = (q, k * scale) if reorder_ops else (q * scale, k)
    scores = torch.einsum("bthd,bshd->bhts", q, k)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    window_size = (window_size[0], 0) if causal else window_size
    hidden = construct_local_mask(
        q.shape[1], k.shape[1], window_size, sink_token_length, query_padding_mask,
        key_padding_mask, key_leftpad, q.device,
    )  # fmt: skip
    if key_padding_mask is not None:
        hidden = hidden | ~key_padding_mask[:, None, None, :]
    if key_leftpad is not None:
        key = torch.arange(k.shape[1], device=q.device)
        hidden = hidden | (key < key_leftpad[:, None])[:, None, None, :]
    scores = scores.masked_fill(hidden, -math.inf)
    if attn_bias is not None:
        scores = scores + attn_bias
    weights = torch.softmax(scores, dim=-1)
    if query_padding_mask is not None:
        hidden = hidden | ~query_padding_mask[:, None, :, None]
    # A row without keys is NaN out of a softmax.
    weights = weights.masked_fill(hidden, 0.0)
    kept = weights if dropout_mask is None else weights.masked_fill(~dropout_mask, 0.0)
    out = torch.einsum("bhts,bshd->bthd", kept / (1.0 - dropout_p), v)
    return out.to(dtype), weights.to(dtype)


if not TYPE_CHECKING:
    __getattr__ = refusing(__name__)
