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
KEYS = 128
# Scores of one (sequence, key head) below which Python's overhead per pair outweighs the products.
WORTHWHILE = 512 * 512
# One pair at a time leaves little to share among threads; torch's kernel gives each its own head.
MOST_THREADS = 2
# Rows that see fewer keys have large dQ, over which no rounding errors average: float32 for them.
FEW_KEYS = 256
# A bfloat16 product of a new shape compiles a kernel, which takes 0.5 ms and 0.7 MB: so all shapes
# are whole multiples of these, whatever the sequence lengths.
ROW_UNIT = 128
SUM_UNIT = 512


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
    if torch.get_num_threads() > MOST_THREADS or k.shape[1] <= FEW_KEYS:
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
            query_side = (x[b, :, heads] for x in (q, dout))
            row_values = (x[b, heads] for x in (lse, softmax_d))
            rows = Rows(*query_side, *row_values, scores.query_scale)
            part = scores.part(slice(b, b + 1), heads)
            grads = (None if grad is None else grad[b, :, h] for grad in (dk, dv))
            dq_sum = _backward_pair(rows, k[b, :, h], v[b, :, h], dq is not None, *grads, part)
            if dq is not None:
                dq[b, :, heads].copy_(dq_sum.view(dq[b, :, heads].shape))


class Rows:
    """The query side of one key head: rows i * groups + g, for query i and query head g.

    Zero rows follow, for products of whole units.
    """

    def __init__(self, q: Tensor, dout: Tensor, lse: Tensor, softmax_d: Tensor, scale: float):
        self.seqlen, self.groups = q.shape[:2]
        rows = self.seqlen * self.groups
        # A power of two, at most sixteen of which make up the rows.
        self.sum_unit = max(SUM_UNIT, 1 << (rows // 16).bit_length())
        self.padded = -(-rows // self.sum_unit) * self.sum_unit
        size = self.padded + ROW_UNIT
        self.q = _padded(size, [q.reshape(rows, -1)])
        self.q_scaled = q.reshape(rows, -1).float().mul_(scale)
        self.dout = _padded(size, [dout.reshape(rows, -1)])
        self.lse = lse.t().reshape(-1, 1)
        self.dout_and_d = _padded(size, [self.dout[:rows], *_thirds(softmax_d.t().reshape(-1, 1))])
        self.unit = max(1, ROW_UNIT // self.groups)  # queries in one unit of rows


def _padded(rows: int, columns: list[Tensor]) -> Tensor:
    """The columns side by side, followed by zero rows."""
    result = columns[0].new_zeros(rows, sum(x.shape[1] for x in columns))
    result[: columns[0].shape[0]] = torch.cat(columns, dim=1)
    return result


def _thirds(x: Tensor) -> list[Tensor]:
    """-x as three bfloat16 numbers that add up to it."""
    thirds = []
    for _ in range(3):
        thirds.append(x.to(torch.bfloat16).neg_())
        x = x + thirds[-1]
    return thirds


class KeyTile:
    """A tile of keys, each operand as its product wants it; zero keys fill the bfloat16 ones."""

    def __init__(self, k: Tensor, v: Tensor):
        keys = k.shape[0]
        self.columns = k.float().t().contiguous()  # (d, keys) float32
        self.k = k.new_zeros(KEYS, k.shape[1])
        self.k[:keys] = k
        # (dv + 3, KEYS): its product with rows.dout_and_d is dO V^T - softmax_d.  The difference
        # has to be taken before it is rounded: where one key has all the weight, the two are nearly
        # equal, and their rounding would be the whole gradient of the score.
        self.v_and_ones = v.new_zeros(v.shape[1] + 3, KEYS)
        self.v_and_ones[:-3, :keys] = v.t()
        self.v_and_ones[-3:, :keys] = 1.0


def _backward_pair(rows: Rows, k, v, want_dq: bool, dk, dv, scores: Scores) -> Tensor | None:
    """k, v (sk, d); writes dk, dv if wanted; returns dq (sq * groups, d) in float32."""
    seqlen_k, groups = k.shape[0], rows.groups
    shift = seqlen_k - rows.seqlen
    dq = torch.zeros_like(rows.q_scaled) if want_dq else None
    p, ds = (rows.q.new_zeros(rows.q.shape[0], KEYS) for _ in range(2))
    for start in range(0, seqlen_k, KEYS):
        keys = range(start, min(start + KEYS, seqlen_k))
        at = slice(keys.start, keys.stop)
        first = min(rows.seqlen, max(0, keys.start - shift - scores.right)) // rows.unit * rows.unit
        end = max(first, min(rows.seqlen, keys.stop - shift + scores.left))
        key_tile = KeyTile(k[at], v[at])
        step = max(rows.unit, ROWS // groups // rows.unit * rows.unit)
        few = min(end, max(first, FEW_KEYS - shift - scores.right)) // rows.unit * rows.unit
        for begin, stop, exact in ((first, few, True), (max(first, few), end, False)):
            for row in range(begin, stop, step):
                place = Place(range(row, min(row + step, stop)), keys, shift, 1, groups)
                _backward_tile(rows, key_tile, p, ds, dq, scores, place, exact)
        for grad, weights, source in ((dv, p, rows.dout), (dk, ds, rows.q)):
            if grad is not None:
                grad[at] = _weighted_sum(weights, source, first * groups, end * groups, rows, keys)
    return dq


def _weighted_sum(weights, source, first: int, end: int, rows: Rows, keys: range) -> Tensor:
    """weights[first:end]^T source[first:end], over whole units of rows: (keys, d)."""
    unit = rows.sum_unit
    low, high = first // unit * unit, -(-end // unit) * unit
    weights[low:first].zero_()
    weights[end:high].zero_()
    weights[first:end, len(keys) :].zero_()
    return torch.mm(weights[low:high].t(), source[low:high])[: len(keys)]


def _backward_tile(
    rows: Rows, key_tile: KeyTile, p_out, ds_out, dq, scores, place: Place, exact: bool
) -> None:
    """Fills p_out and ds_out (rows, KEYS) at one tile; adds to dq, if exact in float32."""
    groups, count = place.groups, len(place.keys)
    first, end = place.rows.start * groups, place.rows.stop * groups
    at, unit = slice(first, end), rows.unit * groups
    whole = slice(first, first + -(-(end - first) // unit) * unit)
    columns = key_tile.columns[None]
    p, cap_slope = score_tile(rows.q_scaled[None, at], columns, scores, place, want_slope=True)
    p = p.squeeze(0).sub_(rows.lse[at]).exp_()
    p_out[at, :count] = p
    dp = torch.mm(rows.dout_and_d[whole], key_tile.v_and_ones)[: end - first, :count]
    # The scale is applied here, in float32: dK and dQ come out of their products rounded.
    ds = p.mul_(dp).mul_(scores.query_scale)
    if cap_slope is not None:
        ds.mul_(cap_slope.squeeze(0))
    ds_out[at, :count] = ds
    if dq is not None and exact:
        dq[at].addmm_(ds, key_tile.columns.t())
    elif dq is not None:
        ds_out[at, count:].zero_()
        dq[at].add_(torch.mm(ds_out[whole], key_tile.k)[: end - first])
