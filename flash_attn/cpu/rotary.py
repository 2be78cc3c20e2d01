"""Rotary position embedding as the cache call fuses it (Su et al. 2021): numerics only.

The differentiable layer for training is `flash_attn.layers.rotary`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.call import accumulation_dtype


def turns(cos: Tensor, sin: Tensor, starts: list[int], length: int) -> Tensor:
    """Rows of the tables cos and sin (max_positions, rotary_dim / 2), as complex numbers.

    Sequence i is at positions starts[i], starts[i] + 1, ..., starts[i] + length - 1.
    Returns (b or 1, length, 1, rotary_dim / 2).
    """
    if all(start == starts[0] for start in starts):
        at = slice(starts[0], starts[0] + length)
        rows = cos[None, at], sin[None, at]
    else:
        index = torch.tensor(starts)[:, None] + torch.arange(length)
        rows = cos[index], sin[index]
    dtype = accumulation_dtype(cos.dtype)
    return torch.complex(*(row.to(dtype) for row in rows)).unsqueeze(2)


def rotate(x: Tensor, turn: Tensor, interleaved: bool) -> Tensor:
    """x (b, s, h, d), turn (b or 1, s or 1, 1, rotary_dim / 2) -> rotated x, in x's dtype.

    The first rotary_dim channels turn: pairs (0, 1), (2, 3), ... if interleaved, else
    (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...
    """
    dim = 2 * turn.shape[-1]
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if dim < x.shape[-1]:
        result[..., dim:] = x[..., dim:]
        x, target = x[..., :dim], result[..., :dim]
    else:
        target = result
    real, imag = _pairs(x.to(turn.real.dtype), interleaved)
    turned = torch.complex(real, imag).mul_(turn)
    real, imag = _pairs(target, interleaved)
    real.copy_(turned.real)
    imag.copy_(turned.imag)
    return result


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
