"""Tiled backward attention in bfloat16, for processors that multiply it natively.

Products of bfloat16 matrices sum in float32 but come out rounded to bfloat16.  So keys are the
outer loop: the probabilities of one key tile, for all rows, wait in bfloat16 until one product each
gives dV and dK, rounded once.  Scores alone stay float32: their rounding would be an exponent's.
Memory is O(seqlen): rows x one key tile.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .scores import Scores
from .tiled_forward import Place, score_tile

# Measured with AVX512_BF16 at head dims 64 and 128, 1k to 4k tokens.
ROWS = 1024
KEYS = 256
# Scores of one (sequence, key head) below which Python's overhead per pair outweighs the products.
WORTHWHILE = 512 * 512


@functools.cache
def native_products() -> bool:
    """Whether the processor has bfloat16 products (else they are slower than float32)."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def is_faster(scores: Scores, q: Tensor, k: Tensor) -> bool:
    if q.dtype != torch.bfloat16 or scores.dropout is not None:
        return False
    if scores.left + scores.right < 4 * KEYS:  # a narrow window: half of each tile would be hidden
        return False
    groups = q.shape[2] // k.shape[2]
    return q.shape[1] * groups * k.shape[1] >= WORTHWHILE and native_products()


def backward(dout, q, k, v, lse, softmax_d, dq, dk, dv, scores: Scores) -> None:
    """Shapes as in attend.attend_backward."""
    batch, kv_heads = q.shape[0], k.shape[2]
    groups = q.shape[2] // kv_heads
    empty = lse == -math.inf
    lse, softmax_d = lse.masked_fill(empty, 0.0), softmax_d.masked_fill(empty, 0.0)
    for b in range(batch):
        for h in range(kv_heads):
            heads = slice(h * groups, (h + 1) * groups)
            rows = Rows(q[b, :, heads], dout[b, :, heads], lse[b, heads], softmax_d[b, heads])
            part = scores.part(slice(b, b + 1), heads)
            grads = (None if grad is None else grad[b, :, h] for grad in (dk, dv))
            dq_sum = _backward_pair(rows, k[b, :, h], v[b, :, h], dq is not None, *grads, part)
            if dq is not None:
                dq[b, :, heads].copy_(dq_sum.view(dq[b, :, heads].shape))


class Rows:
    """The query side of one key head: rows i * groups + g, for query i and query head g."""

    def __init__(self, q: Tensor, dout: Tensor, lse: Tensor, softmax_d: Tensor):
        self.seqlen, self.groups = q.shape[:2]
        self.q = q.reshape(-1, q.shape[-1])  # (seqlen * groups, d)
        self.dout = dout.reshape(-1, dout.shape[-1])
        self.lse = lse.t().reshape(-1, 1)
        self.dout_and_d = torch.cat([self.dout, *_thirds(softmax_d.t().reshape(-1, 1))], dim=1)


def _thirds(x: Tensor) -> list[Tensor]:
    """-x as three bfloat16 numbers that add up to it."""
    thirds = []
    for _ in range(3):
        thirds.append(x.to(torch.bfloat16).neg_())
        x = x + thirds[-1]
    return thirds


def _backward_pair(rows: Rows, k, v, want_dq: bool, dk, dv, scores: Scores) -> Tensor | None:
    """k, v (sk, d); writes dk, dv if wanted; returns dq (sq * groups, d) in float32."""
    seqlen_k = k.shape[0]
    shift = seqlen_k - rows.seqlen
    q_scaled = rows.q.float().mul_(scores.query_scale)
    dq = torch.zeros_like(q_scaled) if want_dq else None
    stacked = rows.q.shape[0]
    p_all = rows.q.new_empty(stacked, min(KEYS, seqlen_k))
    ds_all = torch.empty_like(p_all)
    for start in range(0, seqlen_k, KEYS):
        keys = range(start, min(start + KEYS, seqlen_k))
        at = slice(keys.start, keys.stop)
        first = min(rows.seqlen, max(0, keys.start - shift - scores.right))
        end = max(first, min(rows.seqlen, keys.stop - shift + scores.left))
        k_tile, v_tile = KeyTile(k[at]), _values_and_ones(v[at])
        step = max(16, ROWS // rows.groups)
        p, ds = p_all[:, : len(keys)], ds_all[:, : len(keys)]
        for row in range(first, end, step):
            queries = range(row, min(row + step, end))
            place = Place(queries, keys, shift, 1, rows.groups)
            _backward_tile(rows, q_scaled, k_tile, v_tile, p, ds, dq, scores, place)
        seen = slice(first * rows.groups, end * rows.groups)
        for grad, weights, source in ((dv, p, rows.dout), (dk, ds, rows.q)):
            if grad is not None:
                grad[at] = torch.mm(weights[seen].t(), source[seen])
    return dq


def _values_and_ones(v: Tensor) -> Tensor:
    """v (keys, d) -> (d + 3, keys): with rows.dout_and_d, a product that is dO V^T - softmax_d.

    The difference has to be taken before it is rounded: where one key has all the weight, the two
    are nearly equal, and their rounding would be the whole gradient of the score.
    """
    return torch.cat([v.t(), v.new_ones(3, v.shape[0])])


class KeyTile:
    """A tile of keys as both products want it."""

    def __init__(self, k: Tensor):
        self.rows = k.contiguous()  # (keys, d) bfloat16
        self.columns = k.float().t().contiguous()  # (d, keys) float32


def _backward_tile(
    rows: Rows, q_scaled, k_tile: KeyTile, v_tile, p_out, ds_out, dq, scores: Scores, place: Place
) -> None:
    """Fills p_out and ds_out (rows, keys) at one tile; adds to dq."""
    groups = place.groups
    at = slice(place.rows.start * groups, place.rows.stop * groups)
    p, cap_slope = score_tile(q_scaled[None, at], k_tile.columns[None], scores, place, True)
    p = p.squeeze(0).sub_(rows.lse[at]).exp_()
    p_out[at] = p
    # The scale is applied here, in float32: dK and dQ come out of their products rounded.
    ds = p.mul_(torch.mm(rows.dout_and_d[at], v_tile)).mul_(scores.query_scale)
    if cap_slope is not None:
        ds.mul_(cap_slope.squeeze(0))
    ds_out[at] = ds
    if dq is not None:
        dq[at].add_(torch.mm(ds_out[at], k_tile.rows))
