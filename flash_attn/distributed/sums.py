"""Where the results of several calls are summed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attn.distributed.merge import merge_attention


class Attention:
    """Outputs of the calls so far. The first that has all rows is taken as it is.

    What was added last is merged when something follows: the first merge then widens in passing,
    and the last one rounds to the result's dtype.
    """

    def __init__(self, q: Tensor, v: Tensor, lse_dtype: torch.dtype, dtype: torch.dtype):
        """``dtype``: what is kept between calls, at least as wide as q's."""
        self._out: Tensor | None = None  # (b, s, h, dv)
        self._lse: Tensor | None = None  # (b, h, s)
        self._largest: Tensor | None = None  # logits, (b, h, s)
        self._last: tuple[range, Tensor, Tensor] | None = None
        self._q, self._dtype, self._lse_dtype = q, dtype, lse_dtype
        self._shape = (*q.shape[:3], v.shape[-1])

    def add(self, rows: range, out: Tensor, lse: Tensor, largest: Tensor | None = None) -> None:
        self.merge_last(self._dtype)
        self._last = rows, out, lse
        if largest is not None:
            here = self.largest()[:, :, rows.start : rows.stop]
            torch.maximum(here, largest, out=here)

    def largest(self) -> Tensor:
        """The rows' largest logits of the calls that had them."""
        if self._largest is None:
            self._largest = self._no_keys()
        return self._largest

    def _no_keys(self) -> Tensor:
        b, s, h, _ = self._shape
        return self._q.new_full((b, h, s), -math.inf, dtype=self._lse_dtype)

    def merge_last(self, dtype: torch.dtype) -> None:
        """``dtype``: what the sum is kept in from here on, if all of it is written."""
        if self._last is None:
            return
        (rows, out, lse), self._last = self._last, None
        everything = len(rows) == self._shape[1]
        if self._out is None and everything:
            self._out, self._lse = out, lse
            return
        self._begin()
        if everything:
            other = dtype != self._out.dtype
            into = self._out.new_empty(self._shape, dtype=dtype) if other else None
            merge_attention(self._out, self._lse, out, lse, into)
            self._out = into if other else self._out
            return
        self._out = self._out.to(self._dtype)
        at = slice(rows.start, rows.stop)
        merge_attention(self._out[:, at], self._lse[:, :, at], out, lse)

    def add_sinks(self, s_aux: Tensor) -> None:
        """One more key for all rows, with a score of its own and a value of 0: it counts once."""
        self.merge_last(self._dtype)
        self._begin()
        lse = torch.logaddexp(self._lse, s_aux.to(self._lse_dtype).view(1, -1, 1))
        share = (self._lse - lse).exp_().masked_fill_(self._lse == -math.inf, 0.0)
        self._out.mul_(share.transpose(1, 2).unsqueeze(-1))
        self._lse = lse

    def result(self) -> tuple[Tensor, Tensor]:
        self.merge_last(self._q.dtype)
        self._begin()
        return self._out.to(self._q.dtype), self._lse

    def _begin(self) -> None:
        if self._out is None:
            self._out = self._q.new_zeros(self._shape, dtype=self._dtype)
            self._lse = self._no_keys()


class Gradient:
    """A sum of gradients of (b, s, h, d), each of some rows."""

    def __init__(self, like: Tensor, dtype: torch.dtype, rows: range | None = None):
        """``rows`` of ``like``'s: all, if not given. ``dtype``: the sum's."""
        self._like, self._dtype = like, dtype
        self._rows = range(like.shape[1]) if rows is None else rows
        self._sum: Tensor | None = None

    def add(self, rows: range, part: Tensor) -> None:
        if self._sum is None and rows == self._rows:
            # As it came, however wide: many sums have one part.
            self._sum = part
            return
        total = self._begin()
        first = self._rows.start
        total[:, rows.start - first : rows.stop - first] += part

    def result(self, dtype: torch.dtype) -> Tensor:
        return (self._begin() if self._sum is None else self._sum).to(dtype)

    def _begin(self) -> Tensor:
        if self._sum is None:
            b, _, h, d = self._like.shape
            self._sum = self._like.new_zeros((b, len(self._rows), h, d), dtype=self._dtype)
        elif self._sum.dtype != self._dtype:
            self._sum = self._sum.to(self._dtype)
        return self._sum
