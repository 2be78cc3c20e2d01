"""Rotary position embedding as the cache call fuses it (Su et al. 2021): numerics only.

The differentiable layer for training is `flash_attn.layers.rotary`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scores import accumulation_dtype


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (b, s, h, d), cos and sin (b or 1, s or 1, rotary_dim / 2) -> rotated x, in x's dtype.

    The first rotary_dim channels turn: pairs (0, 1), (2, 3), ... if interleaved, else
    (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...
    """
    half = cos.shape[-1]
    dtype = accumulation_dtype(x.dtype)
    cos, sin = cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2)
    turned = x[..., : 2 * half].to(dtype)
    first, second = _pairs(turned, interleaved)
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    result[..., 2 * half :] = x[..., 2 * half :]
    out_first, out_second = _pairs(result[..., : 2 * half], interleaved)
    out_first.copy_(first * cos - second * sin)
    out_second.copy_(first * sin + second * cos)
    return result


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def positions_of(table: Tensor, starts: list[int], length: int, advance: bool) -> Tensor:
    """Rows of a cos or sin table (max_positions, rotary_dim / 2) for each sequence.

    Sequence i is at positions starts[i], starts[i] + 1, ... if advance, else always at starts[i].
    Returns (b or 1, length or 1, rotary_dim / 2).
    """
    count = length if advance else 1
    if all(start == starts[0] for start in starts):
        return table[None, starts[0] : starts[0] + count]
    index = torch.tensor(starts)[:, None] + torch.arange(count)
    return table[index]
