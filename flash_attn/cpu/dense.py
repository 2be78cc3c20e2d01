"""Attention over a batch of sequences of one length: the ops `forward` and `backward`."""

from __future__ import annotations

import torch
from torch import Tensor

from .attend import attend, attend_backward
from .common import draw_rng_state, sink_gradient, softmax_delta
from .probabilities import probabilities
from .scores import accumulation_dtype, make_scores


def forward(
    q: Tensor,  # (b, sq, h, d)
    k: Tensor,  # (b, sk, hk, d)
    v: Tensor,  # (b, sk, hk, dv)
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
    *,
    s_aux: Tensor | None = None,
    rng_state: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out (b, sq, h, dv), softmax_lse (b, h, sq), S_dmask, rng_state."""
    batch, seqlen_q, heads, _ = q.shape
    rng_state = draw_rng_state(dropout_p, rng_state)
    scores = make_scores(
        q, batch, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, s_aux, dropout_p, rng_state,
    )  # fmt: skip
    out = q.new_empty(batch, seqlen_q, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, seqlen_q, dtype=accumulation_dtype(q.dtype))
    attend(q, k, v, out, lse, scores, batch_invariant=batch_invariant)
    s_dmask = q.new_empty(0)
    if return_softmax:
        s_dmask = q.new_empty(batch, heads, seqlen_q, k.shape[1])
        probabilities(q, k, lse, s_dmask, scores)
    return out, lse, s_dmask, rng_state


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    s_aux: Tensor | None = None,
    ds_aux: Tensor | None = None,
) -> Tensor:
    """Writes the gradients; returns softmax_d (b, h, sq) = rowsum(dO * O) - dlse."""
    scores = make_scores(
        q, q.shape[0], softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, s_aux, dropout_p, rng_state,
    )  # fmt: skip
    softmax_d = torch.empty_like(softmax_lse, memory_format=torch.contiguous_format)
    softmax_delta(dout, out, dlse, softmax_d.transpose(1, 2))
    lse_has_gradient = dlse is not None and bool(dlse.any())
    attend_backward(
        dout, q, k, v, out, softmax_lse, softmax_d, dq, dk, dv, scores, lse_has_gradient
    )
    if ds_aux is not None:
        ds_aux.copy_(sink_gradient(s_aux, softmax_lse, softmax_d, head_dim=1))
    return softmax_d
