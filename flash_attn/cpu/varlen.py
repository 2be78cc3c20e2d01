"""Attention over packed sequences: the ops `varlen_forward` and `varlen_backward`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attend import attend, attend_backward
from .common import draw_rng_state, sink_gradient, softmax_delta
from .paging import Pages
from .probabilities import probabilities
from .scores import accumulation_dtype, make_scores
from .seqlens import Sequence, rows_in_use, sequences


def varlen_forward(
    q: Tensor,  # (total_q, h, d)
    k: Tensor,  # (total_k, hk, d), or pages (num_pages, page_size, hk, d)
    v: Tensor,
    cu_seqlens_q: Tensor,  # (b + 1,) int32
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,  # (b, pages_per_sequence) int32
    leftpad_k: Tensor | None = None,  # (b,) int32
    seqused_k: Tensor | None = None,  # (b,) int32
    zero_tensors: bool = False,
    *,
    s_aux: Tensor | None = None,
    rng_state: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out (total_q, h, dv), softmax_lse (h, total_q), S_dmask, rng_state."""
    total_q, heads, _ = q.shape
    batch = cu_seqlens_q.numel() - 1
    seqs, pages = locate(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, leftpad_k,
        seqused_k,
    )  # fmt: skip
    rng_state = draw_rng_state(dropout_p, rng_state)
    scores = make_scores(
        q, batch, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, s_aux, dropout_p, rng_state,
    )  # fmt: skip
    out = q.new_empty(total_q, heads, v.shape[-1])
    lse = q.new_empty(heads, total_q, dtype=accumulation_dtype(q.dtype))
    s_dmask = q.new_empty(0)
    if return_softmax:
        s_dmask = q.new_zeros(batch, heads, int(max_seqlen_q), int(max_seqlen_k))
    for seq in seqs:
        part = scores.part(slice(seq.index, seq.index + 1), slice(None))
        ks, vs, hidden = _keys_of(seq, k, v, pages)
        qs, lse_s = q[None, seq.rows], lse[None, :, seq.rows]
        attend(qs, ks, vs, out[None, seq.rows], lse_s, part, hidden, batch_invariant)
        if return_softmax:
            target = s_dmask[seq.index : seq.index + 1, :, : seq.seqlen_q, : seq.seqlen_k]
            probabilities(qs, ks, lse_s, target, part)
            if hidden is not None:
                target.masked_fill_(hidden, 0.0)
    used = rows_in_use(seqs)
    for unused in (slice(0, used.start), slice(used.stop, None)):
        out[unused].zero_()
        lse[:, unused].fill_(-math.inf)
    return out, lse, s_dmask, rng_state


def locate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[list[Sequence], Pages | None]:
    """Where the sequences lie, and the pages of their keys.

    Raises for contents of the call's tensors that lie outside.
    """
    pages = None if block_table is None else Pages(k, v, block_table)
    seqs = sequences(
        q.shape[0],
        k.shape[0] if pages is None else None,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        leftpad_k,
        seqused_k,
        None if pages is None else pages.capacity,
    )
    if pages is not None:
        pages.check([seq.keys.stop for seq in seqs])
    return seqs, pages


def _keys_of(seq: Sequence, k: Tensor, v: Tensor, pages: Pages | None):
    """One sequence's k, v (1, seqlen_k, hk, d), and the keys that do not exist (or None)."""
    if pages is not None:
        return pages.read(seq.index, seq.keys)
    return k[None, seq.keys], v[None, seq.keys], None


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,  # (h, total_q)
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
    *,
    dlse: Tensor | None = None,
    s_aux: Tensor | None = None,
    ds_aux: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor:
    """Writes the gradients; returns softmax_d (h, total_q) = rowsum(dO * O) - dlse."""
    batch = cu_seqlens_q.numel() - 1
    seqs, _ = locate(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=seqused_k
    )
    scores = make_scores(
        q, batch, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, s_aux, dropout_p, rng_state,
    )  # fmt: skip
    used = rows_in_use(seqs)
    softmax_d = torch.zeros_like(softmax_lse, memory_format=torch.contiguous_format)
    softmax_delta(
        dout[used],
        out[used],
        None if dlse is None else dlse[:, used],
        softmax_d[:, used].t(),
    )
    lse_has_gradient = dlse is not None and bool(dlse[:, used].any())
    _zero_unused(seqs, used, dq, dk, dv)
    for seq in seqs:
        part = scores.part(slice(seq.index, seq.index + 1), slice(None))
        rows, keys = seq.rows, seq.keys
        attend_backward(
            dout[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            out[None, rows],
            softmax_lse[None, :, rows],
            softmax_d[None, :, rows],
            None if dq is None else dq[None, rows],
            None if dk is None else dk[None, keys],
            None if dv is None else dv[None, keys],
            part,
            lse_has_gradient,
        )
    if ds_aux is not None:
        ds_aux.copy_(sink_gradient(s_aux, softmax_lse[:, used], softmax_d[:, used], head_dim=0))
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
