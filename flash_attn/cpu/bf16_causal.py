"""Gradients of causal self-attention in bfloat16, with torch's bfloat16 kernel for most of them.

The kernel sums dK and dV over blocks of rows in the dtype of its inputs, a rounding per block.
That loses the digit that the accuracy bar asks for where few keys share the weight: near the
diagonal.  So the blocks on the diagonal go through float32.  The rest of the triangle is
rectangles: in every segment of 2 L tokens, the rows of the second half see all keys of the first,
for L = BLOCK, 2 BLOCK, ...  Segments of one length are one call, as if they were sequences, and all
calls add to float32 sums.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import native
from .scores import Scores

# With 2 threads, time of forward + backward over that of torch's SDPA, at 1024 and 2048 tokens:
# 1.28 and 1.17 (d 64), 1.27 and 1.18 (d 128); with 512 1.44 and 1.28, 1.44 and 1.29; all through
# float32 1.41 and 1.36, 1.45 and 1.43.
BLOCK = 256
# Rows of one rectangle that a call sums in bfloat16: four blocks of the kernel.
ROWS = 1024


@functools.cache
def native_products() -> bool:
    """Whether the processor has bfloat16 products (else they are slower than float32)."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def can_express(scores: Scores, q: Tensor, k: Tensor, v: Tensor) -> bool:
    seqlen = q.shape[1]
    plain_causal = scores.right == 0 and scores.left >= seqlen - 1 and scores.slopes is None
    return (
        q.dtype == torch.bfloat16
        and native_products()
        and native.can_express(scores, q, v)
        and plain_causal
        and k.shape[1] == seqlen
        and seqlen >= 4 * BLOCK  # else most of it is diagonal
    )


class Segments(NamedTuple):
    """Equal pieces of every sequence: tokens start + i * step + [0, size), i < count."""

    start: int
    count: int
    step: int
    size: int

    def of(self, x: Tensor) -> Tensor:
        """(b, s, ...) -> (b, count, size, ...), a view."""
        batch, token, *rest = x.stride()
        return x.as_strided(
            (x.shape[0], self.count, self.size, *x.shape[2:]),
            (batch, self.step * token, token, *rest),
            x.storage_offset() + self.start * token,
        )

    def as_batch(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, s, h, ...) -> (b * count, h, size, ...), as the kernel wants it."""
        return self.of(x).flatten(0, 1).transpose(1, 2).to(dtype)


class Piece(NamedTuple):
    rows: Segments
    keys: Segments
    diagonal: bool


def pieces(seqlen: int) -> Iterator[Piece]:
    """Every (row, key) of the causal triangle, once."""
    blocks = seqlen // BLOCK
    yield _diagonal(Segments(0, blocks, BLOCK, BLOCK))
    if seqlen % BLOCK:
        yield _diagonal(Segments(blocks * BLOCK, 1, BLOCK, seqlen % BLOCK))
    size = BLOCK
    while size < seqlen:
        whole, rest = divmod(seqlen, 2 * size)
        if whole:
            yield from _rectangles(0, whole, size, size)
        if rest > size:
            yield from _rectangles(whole * 2 * size, 1, size, rest - size)
        size *= 2


def _diagonal(blocks: Segments) -> Piece:
    return Piece(blocks, blocks, diagonal=True)


def _rectangles(start: int, count: int, size: int, rows: int) -> Iterator[Piece]:
    """In each segment: rows [size, size + rows), keys [0, size)."""
    keys = Segments(start, count, 2 * size, size)
    for first in range(0, rows, ROWS):
        part = Segments(start + size + first, count, 2 * size, min(ROWS, rows - first))
        yield Piece(part, keys, diagonal=False)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, scores: Scores,
) -> None:  # fmt: skip
    """Shapes as in attend.attend_backward; writes those of dq, dk, dv that are not None."""
    for bs, qs, hs in native.converted_parts(q, k):
        queries = [x[bs, :, qs] for x in (dout, q, out)]
        keys = [x[bs, :, hs] for x in (k, v)]
        grads = [
            None if grad is None else grad[bs, :, heads]
            for grad, heads in zip((dq, dk, dv), (qs, hs, hs), strict=True)
        ]
        _backward_part(*queries, lse[bs, qs].transpose(1, 2), *keys, grads, scores.softmax_scale)


def _backward_part(dout, q, out, lse, k, v, grads, softmax_scale: float) -> None:
    """lse (b, s, h), the others (b, s, heads, d)."""
    sums = [
        None if grad is None else torch.zeros(grad.shape, dtype=torch.float32) for grad in grads
    ]
    for rows, keys, diagonal in pieces(q.shape[1]):
        dtype = torch.float32 if diagonal else q.dtype
        dout_rows, q_rows, out_rows = (rows.as_batch(x, dtype) for x in (dout, q, out))
        parts = native.kernel_backward(
            dout_rows,
            q_rows,
            keys.as_batch(k, dtype),
            keys.as_batch(v, dtype),
            out_rows,
            rows.as_batch(lse, lse.dtype),
            0.0,
            diagonal,
            scale=softmax_scale,
        )
        for total, part, at in zip(sums, parts, (rows, keys, keys), strict=True):
            if total is not None:
                total = at.of(total)
                total.add_(part.transpose(1, 2).unflatten(0, total.shape[:2]))
    for grad, total in zip(grads, sums, strict=True):
        if grad is not None:
            grad.copy_(total)
