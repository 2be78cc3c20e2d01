"""One backward, of dense and of packed rows."""

from __future__ import annotations

from torch import Tensor

from flash_attn.call import Gradients, Keys, Lengths, Options
from flash_attn.dispatch import private
from flash_attn_3 import _chunks, _rows


class _Packing:
    """Dense tensors as packed ones; packed ones as they are."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None, longest: int | Tensor | None):
        self.shape = x.shape[:2] if cu_seqlens is None else None
        if self.shape is None:
            self.cu_seqlens = cu_seqlens
            self.longest = x.shape[0] if longest is None else longest
        else:
            self.cu_seqlens, self.longest = _rows.ends(*self.shape, x), x.shape[1]

    def rows(self, x: Tensor) -> Tensor:
        return x if self.shape is None else x.flatten(0, 1)

    def per_row(self, x: Tensor) -> Tensor:
        """(b, h, s) → (h, b · s)."""
        return x if self.shape is None else x.transpose(0, 1).flatten(1)

    def per_row_back(self, x: Tensor) -> Tensor:
        return x if self.shape is None else x.unflatten(1, self.shape).transpose(0, 1)

    def buffer(self, gradient: Tensor | None) -> Tensor | None:
        """The caller's where rows are packed already, else one of our own."""
        if gradient is None or self.shape is None:
            return gradient
        return gradient.new_empty(gradient.flatten(0, 1).shape)

    def give(self, gradient: Tensor | None, buffer: Tensor | None) -> None:
        if gradient is not None and gradient is not buffer:
            gradient.copy_(buffer.unflatten(0, self.shape))


def backward(
    tensors: Gradients, options: Options, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None, seqused_k: Tensor | None, max_seqlen_q: int | None,
    max_seqlen_k: int | None, attention_chunk: int | None,
) -> Tensor:  # fmt: skip
    """Overwrites dq, dk and dv where given; returns softmax_d (b, h, sq), or (h, total_q).

    Rows that are not in use, of q or of k and v, get the gradient 0.
    """
    chunk = _chunks.checked(attention_chunk)
    packed = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if not chunk and all(x is None for x in packed):
        return private.backward(tensors, options, None)
    dout, q, k, v, out, lse, dq, dk, dv, dlse, ds_aux = tensors
    of_q = _Packing(q, cu_seqlens_q, max_seqlen_q)
    of_k = _Packing(k, cu_seqlens_k, max_seqlen_k)
    buffers = of_q.buffer(dq), of_k.buffer(dk), of_k.buffer(dv)
    tensors = Gradients(
        of_q.rows(dout), of_q.rows(q), of_k.rows(k), of_k.rows(v), of_q.rows(out),
        of_q.per_row(lse), *buffers, None if dlse is None else of_q.per_row(dlse), ds_aux,
    )  # fmt: skip
    lengths = Lengths(of_q.cu_seqlens, of_k.cu_seqlens, of_q.longest, of_k.longest)
    dense = of_q.shape is not None and of_k.shape is not None
    lengths, keys, options = _chunks.as_sequences(
        tensors.q, tensors.k, tensors.v, lengths, Keys(seqused_k=seqused_k), options, seqused_q,
        chunk, aligned=dense and q.shape[1] <= k.shape[1],
    )  # fmt: skip
    softmax_d = private.backward(tensors, options, None, lengths, keys.seqused_k)
    for packing, gradient, buffer in zip((of_q, of_k, of_k), (dq, dk, dv), buffers):
        packing.give(gradient, buffer)
    return of_q.per_row_back(softmax_d)
