"""A KV cache of codes: a key or a value is its float8_e4m3fn code times its descale.

GPU kernels compute the same codes (csrc/decode/codes.h), so appended rows are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn.call import FP8, Descales, accumulation_dtype

#: The largest code.
LARGEST: float = 448.0


def encoded(x: Tensor, descale: Tensor) -> Tensor:
    """The codes of x / descale.

    Divided in float32, then rounded to the nearest code, to the even one of two. What lies beyond
    ±448 becomes ±448, infinities too (a cast may make NaN of them); NaN stays NaN.

    Arguments:
        x: (…, hk, d), any floating dtype.
        descale: float32, (), (hk,) or (…, hk). A tensor on x's device, because torch multiplies by
            the reciprocal of a number on a GPU.

    Returns:
        float8_e4m3fn, shaped like x.
    """
    scaled = x.to(torch.float32) / descale[..., None]
    return scaled.clamp_(-LARGEST, LARGEST).to(FP8)


def decoded(codes: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of codes (…, hk, d), for descale as above, in a dtype."""
    return codes.to(dtype).mul_(descale[..., None].to(dtype))


class Codes:
    """The codes of both caches of a call: k and v (b_cache, s_cache, hk, d), or pages."""

    def __init__(self, descales: Descales, q: Tensor):
        self.dtype = accumulation_dtype(q.dtype)  # of decoded rows
        tensors, numbers = descales[:2], descales[2:]
        self._scales = [
            (given, torch.tensor(number, dtype=torch.float32))
            for given, number in zip(tensors, numbers, strict=True)
        ]

    @classmethod
    def of(cls, k: Tensor, descales: Descales, q: Tensor) -> Codes | None:
        """None for a cache in q's dtype."""
        return cls(descales, q) if k.dtype is FP8 else None

    def encoded(self, i: int, new: tuple[Tensor, Tensor], rows: Callable) -> list[Tensor]:
        """Codes of new rows of sequence i, k and v (n, hk, d).

        rows: from a tensor that is laid out as the cache is to those of these rows, (n, …).
        """
        return [encoded(x, scale) for x, scale in zip(new, self._of(i, rows), strict=True)]

    def decoded(self, i: int, codes: tuple[Tensor, Tensor], rows: Callable) -> list[Tensor]:
        """Keys and values of sequence i, of codes (1, n, hk, d); rows as above."""
        return [
            decoded(x, scale, self.dtype) for x, scale in zip(codes, self._of(i, rows), strict=True)
        ]

    def _of(self, i: int, rows: Callable) -> list[Tensor]:
        """The descales of k and of v: (), (hk,) or (n, hk)."""
        return [
            number if given is None else number * (rows(given) if given.dim() == 3 else given[i])
            for given, number in self._scales
        ]
