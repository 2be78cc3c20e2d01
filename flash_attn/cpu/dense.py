"""Attention over a batch of sequences of one length: the ops `forward` and `backward`."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.call import Backward, Forward, accumulation_dtype

from .attend import attend, attend_backward
from .common import draw_rng_state, max_logits_output, sink_gradient, softmax_delta
from .probabilities import probabilities
from .scores import make_scores


def forward(call: Forward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out (b, sq, h, dv), softmax_lse (b, h, sq), score_output, rng_state."""
    q, k, v = call.q, call.k, call.v
    batch, seqlen_q, heads, _ = q.shape
    rng_state = draw_rng_state(call.scoring.dropout_p, call.rng_state)
    scores = make_scores(q, batch, call.scoring, rng_state)
    out = q.new_empty(batch, seqlen_q, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, seqlen_q, dtype=accumulation_dtype(q.dtype))
    max_logits = torch.empty_like(lse) if call.return_max_logits else None
    attend(
        q, k, v, out, lse, scores, batch_invariant=call.batch_invariant, max_logits=max_logits
    )  # fmt: skip
    score_output = q.new_empty(0) if max_logits is None else max_logits_output(call, max_logits)
    if call.return_softmax:
        score_output = q.new_empty(batch, heads, seqlen_q, k.shape[1])
        probabilities(q, k, lse, score_output, scores)
    return out, lse, score_output, rng_state


def backward(call: Backward) -> Tensor:
    """Writes the gradients; returns softmax_d (b, h, sq) = rowsum(dO * O) - dlse."""
    dout, q, k, v, out, lse, dq, dk, dv, dlse, ds_aux = call.tensors
    scores = make_scores(q, q.shape[0], call.scoring, call.rng_state)
    softmax_d = torch.empty_like(lse, memory_format=torch.contiguous_format)
    softmax_delta(dout, out, dlse, softmax_d.transpose(1, 2))
    lse_has_gradient = dlse is not None and bool(dlse.any())
    attend_backward(dout, q, k, v, out, lse, softmax_d, dq, dk, dv, scores, lse_has_gradient)
    if ds_aux is not None:
        ds_aux.copy_(sink_gradient(call.scoring.s_aux, lse, softmax_d, head_dim=1))
    return softmax_d
