"""Attention over packed sequences: the ops `varlen_forward` and `varlen_backward`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flash_attn.call import Backward, Forward, Keys, Lengths, accumulation_dtype

from . import latent
from .attend import attend, attend_backward
from .batches import Batch, batches
from .common import draw_rng_state, max_logits_output, sink_gradient, softmax_delta
from .fp8 import Codes
from .paging import Pages
from .probabilities import probabilities
from .scores import make_scores
from .seqlens import Sequence, rows_in_use, sequences


def varlen_forward(call: Forward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out (total_q, h, dv), softmax_lse (h, total_q), score_output,
    rng_state."""
    q, k, v, lengths = call.q, call.k, call.v, call.lengths
    total_q, heads, _ = q.shape
    seqs, pages = locate(q, k, v, lengths, call.keys)
    if call.qv is not None and pages is None:
        raise ValueError("qv: got one without block_table; it is for a latent cache, in pages")
    codes = Codes.of(k, call.descales, q)
    if codes is not None:
        q = q.to(codes.dtype)
    q = latent.queries(q, call.qv)
    rng_state = draw_rng_state(call.scoring.dropout_p, call.rng_state)
    scores = make_scores(q, lengths.batch, call.scoring, rng_state)
    out = q.new_empty(total_q, heads, v.shape[-1])
    lse = q.new_empty(heads, total_q, dtype=accumulation_dtype(q.dtype))
    max_logits = torch.empty_like(lse) if call.return_max_logits else None
    score_output = call.q.new_empty(0)
    if call.return_softmax:
        longest = int(lengths.max_seqlen_q), int(lengths.max_seqlen_k)
        score_output = call.q.new_zeros(lengths.batch, heads, *longest)
    for batch in batches(seqs, together=pages is None):
        part = scores.part(batch.members, slice(None))
        ks, vs, hidden = _keys_of(batch, k, v, pages, codes)
        if call.qv is not None:
            ks = latent.keys(ks, vs)
        qs, lses = batch.of_rows(q), batch.of_heads(lse)
        maxima = None if max_logits is None else batch.of_heads(max_logits)
        attend(qs, ks, vs, batch.of_rows(out), lses, part, hidden, call.batch_invariant, maxima)
        if call.return_softmax:
            target = score_output[batch.members, :, : qs.shape[1], : ks.shape[1]]
            probabilities(qs, ks, lses, target, part)
            if hidden is not None:
                target.masked_fill_(hidden, 0.0)
    used = rows_in_use(seqs)
    for unused in (slice(0, used.start), slice(used.stop, None)):
        out[unused].zero_()
        lse[:, unused].fill_(-math.inf)
        if max_logits is not None:
            max_logits[:, unused].fill_(-math.inf)
    if max_logits is not None:
        score_output = max_logits_output(call, max_logits)
    return out.to(call.q.dtype), lse, score_output, rng_state


def check_contents(arguments: dict[str, Any]) -> None:
    """Raises for index tensors whose contents lie outside; ``arguments``: the operation's."""
    call = Forward.of(arguments)
    locate(call.q, call.k, call.v, call.lengths, call.keys)


def locate(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, keys: Keys
) -> tuple[list[Sequence], Pages | None]:
    """Where the sequences lie, and the pages of their keys.

    Raises for contents of the call's tensors that lie outside.
    """
    pages = None if keys.block_table is None else Pages(k, v, keys.block_table)
    if pages is None:
        return sequences(q.shape[0], k.shape[0], lengths, keys), None
    seqs = sequences(q.shape[0], None, lengths, keys, pages.capacity)
    pages.check([seq.keys.stop for seq in seqs])
    return seqs, pages


def _keys_of(batch: Batch, k: Tensor, v: Tensor, pages: Pages | None, codes: Codes | None):
    """A batch's k, v (b, seqlen_k, hk, d), and the keys that do not exist (or None)."""
    if pages is not None:
        index, keys = batch.first.index, batch.keys
        k, v, hidden = pages.read(index, keys)
        if codes is not None:
            k, v = codes.decoded(index, (k, v), lambda x: pages.rows(x, index, keys))
        return k, v, hidden
    return batch.of_keys(k), batch.of_keys(v), None


def varlen_backward(call: Backward) -> Tensor:
    """Writes the gradients; returns softmax_d (h, total_q) = rowsum(dO * O) - dlse."""
    dout, q, k, v, out, lse, dq, dk, dv, dlse, ds_aux = call.tensors
    seqs, _ = locate(q, k, v, call.lengths, call.keys)
    scores = make_scores(q, call.lengths.batch, call.scoring, call.rng_state)
    used = rows_in_use(seqs)
    softmax_d = torch.zeros_like(lse, memory_format=torch.contiguous_format)
    softmax_delta(
        dout[used],
        out[used],
        None if dlse is None else dlse[:, used],
        softmax_d[:, used].t(),
    )
    lse_has_gradient = dlse is not None and bool(dlse[:, used].any())
    _zero_unused(seqs, used, dq, dk, dv)
    for batch in batches(seqs):
        attend_backward(
            batch.of_rows(dout),
            batch.of_rows(q),
            batch.of_keys(k),
            batch.of_keys(v),
            batch.of_rows(out),
            batch.of_heads(lse),
            batch.of_heads(softmax_d),
            None if dq is None else batch.of_rows(dq),
            None if dk is None else batch.of_keys(dk),
            None if dv is None else batch.of_keys(dv),
            scores.part(batch.members, slice(None)),
            lse_has_gradient,
        )
    if ds_aux is not None:
        ds_aux.copy_(sink_gradient(call.scoring.s_aux, lse[:, used], softmax_d[:, used], 0))
    return softmax_d


def _zero_unused(seqs: list[Sequence], rows: slice, dq, dk, dv) -> None:
    """Zeroes the gradients of rows and keys that belong to no sequence."""
    if dq is not None:
        dq[: rows.start].zero_()
        dq[rows.stop :].zero_()
    end = 0
    gaps = []
    for seq in seqs:
        gaps.append(slice(end, seq.keys.start))
        end = seq.keys.stop
    gaps.append(slice(end, None))
    for grad in (dk, dv):
        if grad is not None:
            for gap in gaps:
                if gap.stop is None or gap.stop > gap.start:
                    grad[gap].zero_()
