"""Tiled backward attention over sequences of equal length.

Scores are computed again, tile by tile, by the same products as in the forward pass, so that
exp(score - lse) repeats the forward's probabilities to the last bit that LSE can hold.  dK and dV
of a few heads accumulate in the accumulation type; memory is O(seqlen).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn.call import accumulation_dtype

from . import tiling
from .scores import Scores, tile_keep
from .tiled_forward import Place, score_tile


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, softmax_d: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, scores: Scores,
) -> None:  # fmt: skip
    """Shapes as in attend.attend_backward."""
    for bs, qs, hs in tiling.head_parts(q, k):
        _backward_part(
            dout[bs, :, qs],
            q[bs, :, qs],
            k[bs, :, hs],
            v[bs, :, hs],
            lse[bs, qs],
            softmax_d[bs, qs],
            None if dq is None else dq[bs, :, qs],
            None if dk is None else dk[bs, :, hs],
            None if dv is None else dv[bs, :, hs],
            scores.part(bs, qs),
        )


def _backward_part(dout, q, k, v, lse, softmax_d, dq, dk, dv, scores) -> None:
    dtype = accumulation_dtype(q.dtype)
    seqlen_q, (seqlen_k, kv_heads) = q.shape[1], k.shape[1:3]
    shift = seqlen_k - seqlen_q
    group, step, base, end = tiling.cut_keys(q, k, scores)
    kf = tiling.keys_first(k[:, base:end], dtype)  # (b * hk, keys, d)
    vf = tiling.keys_first(v[:, base:end], dtype)  # (b * hk, keys, dv)
    dkf = None if dk is None else torch.zeros(kf.shape, dtype=dtype)
    dvf = None if dv is None else torch.zeros(vf.shape, dtype=dtype)
    # A row that saw no key has LSE -inf; 0 keeps -inf - -inf out of the exp, and its scores are
    # all -inf already.
    empty = lse == -math.inf
    lse, softmax_d = lse.masked_fill(empty, 0.0), softmax_d.masked_fill(empty, 0.0)
    dout_scale = scores.dropout.scale if scores.dropout is not None else 1.0
    for rows in tiling.row_tiles(seqlen_q, group):
        here = slice(rows.start, rows.stop)
        tile = RowTile(
            q=tiling.stacked_rows(q[:, here], kv_heads, dtype, scores.query_scale),
            dout=tiling.stacked_rows(dout[:, here], kv_heads, dtype, dout_scale),
            lse=tiling.stacked_column(lse[:, :, here], kv_heads),
            softmax_d=tiling.stacked_column(softmax_d[:, :, here], kv_heads),
            want_dq=dq is not None,
        )
        for keys in tiling.key_tiles(scores, rows, shift, seqlen_k, step):
            at = slice(keys.start - base, keys.stop - base)
            dk_tile, dv_tile = (None if g is None else g[:, at] for g in (dkf, dvf))
            place = Place(rows, keys, shift, kv_heads, group)
            _backward_tile(tile, kf[:, at], vf[:, at], dk_tile, dv_tile, scores, place)
        if dq is not None:
            if tile.dq is None:
                dq[:, here].zero_()
            else:
                tiling.unstack_rows(tile.dq.mul_(scores.query_scale), dq[:, here], kv_heads)
    _write_keys(dkf, dk, base, end)
    _write_keys(dvf, dv, base, end)


@dataclass
class RowTile:
    """What stays fixed, and what accumulates, while a row tile walks over the keys."""

    q: Tensor  # (b * hk, rows * g, d), times scores.query_scale
    dout: Tensor  # (b * hk, rows * g, dv), over the probability of being kept
    lse: Tensor  # (b * hk, rows * g, 1)
    softmax_d: Tensor
    want_dq: bool
    dq: Tensor | None = None


def _backward_tile(tile: RowTile, k_tile, v_tile, dk_tile, dv_tile, scores, place) -> None:
    p, cap_slope = score_tile(tile.q, k_tile.transpose(1, 2), scores, place, want_slope=True)
    p.sub_(tile.lse).exp_()
    keep = None
    if scores.dropout is not None:
        keep = tile_keep(scores.dropout, place.group, place.rows, place.keys).reshape(p.shape)
    if dv_tile is not None:
        dropped = p if keep is None else p * keep
        dv_tile.baddbmm_(dropped.transpose(1, 2), tile.dout)
    if dk_tile is None and not tile.want_dq:
        return
    ds = torch.bmm(tile.dout, v_tile.transpose(1, 2))
    if keep is not None:
        ds.mul_(keep)
    ds.sub_(tile.softmax_d).mul_(p)
    if cap_slope is not None:
        ds.mul_(cap_slope)
    if dk_tile is not None:
        dk_tile.baddbmm_(ds.transpose(1, 2), tile.q)
    if tile.want_dq:
        tile.dq = torch.bmm(ds, k_tile) if tile.dq is None else tile.dq.baddbmm_(ds, k_tile)


def _write_keys(source: Tensor | None, grad: Tensor | None, base: int, end: int) -> None:
    """(b * hk, end - base, d) into grad (b, sk, hk, d), zeros elsewhere."""
    if grad is None:
        return
    batch, kv_heads = grad.shape[0], grad.shape[2]
    grad[:, :base].zero_()
    grad[:, end:].zero_()
    grad[:, base:end].copy_(source.unflatten(0, (batch, kv_heads)).transpose(1, 2))
