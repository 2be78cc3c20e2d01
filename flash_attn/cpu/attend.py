"""Attention over sequences of equal length: the one place that picks how it is computed.

Everything above (dense, varlen, KV cache) brings views of the call's tensors here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import bf16_causal, native, tiled_backward, tiled_forward
from .scores import Scores, no_keys


def attend(
    q: Tensor,  # (b, sq, h, d), any strides
    k: Tensor,  # (b, sk, hk, d)
    v: Tensor,  # (b, sk, hk, dv)
    out: Tensor,  # (b, sq, h, dv), written
    lse: Tensor,  # (b, h, sq), written
    scores: Scores,
    hidden_keys: Tensor | None = None,  # (sk,) bool, keys no row may see (missing pages)
    batch_invariant: bool = False,
    max_logits: Tensor | None = None,  # (b, h, sq), written; None: not wanted
) -> None:
    if q.shape[0] == 0 or q.shape[1] == 0:
        return
    if batch_invariant:
        _attend_one_by_one(q, k, v, out, lse, scores, hidden_keys, max_logits)
        return
    if k.shape[1] == 0:
        no_keys(out, lse, scores)
        if max_logits is not None:
            max_logits.fill_(-math.inf)
    elif hidden_keys is None and max_logits is None and native.can_express(scores, q, v):
        doubtful = native.forward(q, k, v, out, lse, scores)
        if doubtful is not None:
            _attend_again(q, k, v, out, lse, scores, doubtful)
    else:
        tiled_forward.forward(q, k, v, out, lse, scores, hidden_keys, max_logits=max_logits)


def _attend_again(q, k, v, out, lse, scores: Scores, rows: Tensor) -> None:
    """Replaces some rows, (b, h, sq) bool, and leaves the others as they are, to the bit."""
    new_out, new_lse = torch.empty_like(out), torch.empty_like(lse)
    tiled_forward.forward(q, k, v, new_out, new_lse, scores, wanted=rows.any(0).any(0))
    out.copy_(torch.where(rows.transpose(1, 2).unsqueeze(3), new_out, out))
    lse.copy_(torch.where(rows, new_lse, lse))


def _attend_one_by_one(
    q, k, v, out, lse, scores: Scores, hidden_keys: Tensor | None, max_logits: Tensor | None
) -> None:
    """Each sequence by itself, on copies: its result is then a function of its values alone.

    Products and vector functions round differently with an operand's alignment and with where a
    vector's tail falls, so a view into a batch would let its neighbours' lengths in.
    """
    for i in range(q.shape[0]):
        one = slice(i, i + 1)
        inputs = (x[one].clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        out_copy = out.new_empty(out[one].shape)
        lse_copy = lse.new_empty(lse[one].shape)
        part = scores.part(one, slice(None))
        own_max = None if max_logits is None else max_logits[one]
        attend(*inputs, out_copy, lse_copy, part, hidden_keys, max_logits=own_max)
        out[one] = out_copy
        lse[one] = lse_copy


def attend_backward(
    dout: Tensor,  # (b, sq, h, dv)
    q: Tensor,  # (b, sq, h, d)
    k: Tensor,  # (b, sk, hk, d)
    v: Tensor,  # (b, sk, hk, dv)
    out: Tensor,  # (b, sq, h, dv)
    lse: Tensor,  # (b, h, sq), sinks included
    softmax_d: Tensor,  # (b, h, sq): rowsum(dO * O) - dlse
    dq: Tensor | None,  # written, any strides; None: not wanted
    dk: Tensor | None,
    dv: Tensor | None,
    scores: Scores,
    lse_has_gradient: bool,
) -> None:
    if q.shape[0] == 0 or q.shape[1] == 0 or k.shape[1] == 0:
        for grad in (dq, dk, dv):
            if grad is not None:
                grad.zero_()
    elif not lse_has_gradient and bf16_causal.can_express(scores, q, k, v):
        bf16_causal.backward(dout, q, k, v, out, lse, dq, dk, dv, scores)
    elif not lse_has_gradient and native.can_express(scores, q, v):
        native.backward(dout, q, k, v, out, lse, dq, dk, dv, scores)
    else:
        tiled_backward.backward(dout, q, k, v, lse, softmax_d, dq, dk, dv, scores)
