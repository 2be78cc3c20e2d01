"""Attention of codes: the op `fp8_forward`. Numbers are code times descale, in float32.

No more of them are made at a time than native.py makes of float16: a few heads of q, k and v.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flash_attn.call import CodedForward

from . import native
from .attend import attend
from .batches import batches
from .fp8 import decoded
from .scores import Scores, make_scores
from .seqlens import rows_in_use
from .varlen import locate


def fp8_forward(call: CodedForward) -> tuple[Tensor, Tensor]:
    """Returns out (b, sq, h, dv), softmax_lse (b, h, sq); of packed rows (total_q, h, dv) and
    (h, total_q)."""
    q, k, v = call.q, call.k, call.v
    *batch, rows, heads, _ = q.shape
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=call.dtype)
    lse = q.new_empty((*batch, heads, rows), dtype=torch.float32)
    sequences = q.shape[0] if call.lengths is None else call.lengths.batch
    attention = _Attention(call, sequences, k.shape[-2])
    if call.lengths is None:
        attention.of(slice(None), q, k, v, out, lse)
        return out, lse
    seqs, pages = locate(q, k, v, call.lengths, call.keys)
    for batch in batches(seqs, together=pages is None):
        if pages is None:
            ks, vs, hidden = batch.of_keys(k), batch.of_keys(v), None
        else:
            ks, vs, hidden = pages.read(batch.first.index, batch.keys)
        attention.of(
            batch.members, batch.of_rows(q), ks, vs, batch.of_rows(out), batch.of_heads(lse), hidden
        )
    used = rows_in_use(seqs)
    for unused in (slice(0, used.start), slice(used.stop, None)):
        out[unused].zero_()
        lse[:, unused].fill_(-math.inf)
    return out, lse


def check_contents(arguments: dict[str, Any]) -> None:
    """Checks what tensors among the op's arguments contain, which come by name."""
    call = CodedForward.of(arguments)
    if call.lengths is not None:
        locate(call.q, call.k, call.v, call.lengths, call.keys)


class _Attention:
    """What all sequences of a call have in common."""

    def __init__(self, call: CodedForward, sequences: int, kv_heads: int):
        self.scores: Scores = make_scores(call.q, sequences, call.scoring)
        self.batch_invariant = call.batch_invariant
        self.descales = [
            _of_heads(tensor, number, sequences, kv_heads)
            for tensor, number in zip(call.descales[:3], call.descales[3:], strict=True)
        ]

    def of(
        self, members: slice, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        hidden_keys: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Some sequences of one length; shapes as in attend.attend."""
        if q.numel() == 0:
            return
        group = q.shape[2] // k.shape[2]
        scores = self.scores.part(members, slice(None))
        descales = [x[members] for x in self.descales]
        for bs, qs, hs in native.converted_parts(q, k):
            q_scale, k_scale, v_scale = (x[bs, None, hs] for x in descales)
            q_part = decoded(q[bs, :, qs], q_scale.repeat_interleave(group, -1), torch.float32)
            k_part = decoded(k[bs, :, hs], k_scale, torch.float32)
            v_part = decoded(v[bs, :, hs], v_scale, torch.float32)
            part = torch.empty((*q_part.shape[:-1], v.shape[-1]))
            attend(
                q_part, k_part, v_part, part, lse[bs, qs], scores.part(bs, qs), hidden_keys,
                self.batch_invariant,
            )  # fmt: skip
            out[bs, :, qs] = part


def _of_heads(tensor: Tensor | None, number: float, sequences: int, kv_heads: int) -> Tensor:
    """(b, hk) float32"""
    scale = torch.tensor(number, dtype=torch.float32)
    scale = scale if tensor is None else scale * tensor
    return scale.expand(sequences, kv_heads)
