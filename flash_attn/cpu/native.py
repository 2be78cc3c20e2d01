"""Attention through torch's own CPU flash attention, for the calls that it can express.

It knows no windows, no ALiBi and no corner but the top left, yet it adds a float mask of any
strides to the scores.  All three are functions of j - i alone, so the mask of a block of rows is a
Toeplitz matrix: a vector of rows + keys numbers seen through strides (1, 1), once the keys are in
reverse order.  That costs O(rows + keys) memory, and a call per block of rows skips what a window
or a causal mask hides.

Whatever runs on several threads ends with a wait for the last of them, and on a busy machine that
one may have to wait for a processor, while the others spin.  So blocks are few, and what can be
done for all of them at once is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn.call import accumulation_dtype

from . import tiling
from .scores import Scores, cuts, no_keys, visible_keys

_aten = torch.ops.aten
_forward = _aten._scaled_dot_product_flash_attention_for_cpu.default
kernel_backward: Callable[..., Any] = (
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)

# The kernel's own causal mask skips in steps of 512 keys.  Shorter sequences than this gain from a
# call per row block (fp32, d 64, forward + backward at 512: 60 against 90 ms); longer ones gain
# less than the calls' barriers can cost on a busy machine.
LONG_CAUSAL = 768
# Elements of one tensor that are converted to float32 at a time.
CONVERTED = 1 << 22


def can_express(scores: Scores, q: Tensor, v: Tensor) -> bool:
    return not scores.softcap and scores.dropout is None and q.shape[-1] == v.shape[-1]


class Block(NamedTuple):
    """Rows of every sequence, the keys that they see, and how the kernel is told."""

    rows: slice
    keys: slice
    causal: bool  # by the kernel's own mask
    masked: bool  # by a Toeplitz mask

    @property
    def single(self) -> bool:
        return self.rows.stop - self.rows.start == 1


def _blocks(scores: Scores, first_row: int, seqlen_q: int, seqlen_k: int) -> Iterator[Block]:
    """Blocks that cover rows [first_row, seqlen_q), each of which sees a key."""
    shift = seqlen_k - seqlen_q
    biased = scores.slopes is not None
    rows = range(first_row, seqlen_q)
    keys = range(*visible_keys(scores, rows, shift, seqlen_k))
    cut_left, cut_right = cuts(scores, rows, keys, shift)
    step = len(rows)
    if cut_left or cut_right or (biased and len(rows) > 1):
        square = cut_right and not cut_left and shift == 0 and scores.right == 0 and not biased
        if square and seqlen_q > LONG_CAUSAL:
            yield Block(slice(0, seqlen_q), slice(0, seqlen_k), causal=True, masked=False)
            return
        width = min(seqlen_k, scores.left + scores.right + 1)
        # A quarter of the keys: shorter blocks skip more of the corner, and take longer in all.
        step = min(256, max(64, width // 4 // 64 * 64))
    for start in range(first_row, seqlen_q, step):
        rows = range(start, min(start + step, seqlen_q))
        keys = range(*visible_keys(scores, rows, shift, seqlen_k))
        masked = biased or any(cuts(scores, rows, keys, shift))
        yield Block(slice(start, rows.stop), slice(keys.start, keys.stop), False, masked)


class _Keys:
    """k and v (b, sk, hk, d), last key first if one of the blocks has a mask."""

    def __init__(self, k: Tensor, v: Tensor, blocks: list[Block]):
        self.length = k.shape[1]
        self.reverse = any(block.masked for block in blocks)
        self.tensors = [x.flip(1) if self.reverse else x for x in (k, v)]

    def slice(self, block: Block) -> slice:
        if not self.reverse:
            return block.keys
        return slice(self.length - block.keys.stop, self.length - block.keys.start)

    def of(self, block: Block) -> list[Tensor]:
        """k, v (b, hk, keys, d)"""
        return [x[:, self.slice(block)].transpose(1, 2) for x in self.tensors]


def _toeplitz(scores: Scores, block: Block, shift: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores, for keys in reverse order: (1 or b, 1 or h, rows, keys)."""
    rows, keys = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    # Entry [i', j'] is row start + i', key stop - 1 - j', so j - i - shift = farthest - i' - j'.
    farthest = block.keys.stop - 1 - block.rows.start - shift
    relative = torch.arange(farthest, farthest - rows - keys + 1, -1)
    hidden = (relative > scores.right).logical_or_(relative < -scores.left)
    values = torch.zeros(1, 1, relative.numel(), dtype=dtype)
    if scores.slopes is not None:
        # A slope per head alone is one row that all sequences share.
        slopes = scores.slopes if scores.slopes.stride(0) else scores.slopes[:1]
        values = relative.abs() * -slopes[..., None]  # (1 or b, h, rows + keys - 1)
    values = values.masked_fill_(hidden, -math.inf)
    batch, heads, _ = values.shape
    return values.as_strided((batch, heads, rows, keys), (*values.stride()[:2], 1, 1))


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Tensor | None:
    """q (b, sq, h, d), k, v (b, sk, hk, d) -> out (b, sq, h, d), lse (b, h, sq), written.

    float16 goes through float32: without products of its own the processor takes half the time.

    Returns the rows to compute in another way, (b, h, sq) bool, or None: see `_doubtful`.
    """
    if q.dtype != torch.float16 or q.shape[1] == 1:
        return _forward_part(q, k, v, out, lse, scores)
    doubtful = None
    for bs, qs, hs in converted_parts(q, k):
        q32, k32, v32 = q[bs, :, qs].float(), k[bs, :, hs].float(), v[bs, :, hs].float()
        out32 = torch.empty_like(q32)
        rows = _forward_part(q32, k32, v32, out32, lse[bs, qs], scores.part(bs, qs))
        out[bs, :, qs] = out32
        if rows is not None:
            doubtful = torch.zeros(lse.shape, dtype=torch.bool) if doubtful is None else doubtful
            doubtful[bs, qs] = rows
    return doubtful


def converted_parts(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """(sequences, query heads, key heads) small enough for copies in float32."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    pairs = CONVERTED // (max(seqlen_q * group, seqlen_k) * head_dim)
    pairs = max(pairs, torch.get_num_threads())  # the kernel's unit of parallel work
    for bs, hs in tiling.parts(batch, kv_heads, pairs):
        yield bs, slice(hs.start * group, hs.stop * group), hs


def _forward_part(q, k, v, out, lse, scores: Scores) -> Tensor | None:
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    first_row = _first_row(scores, seqlen_q, seqlen_k)
    blocks = list(_blocks(scores, first_row, seqlen_q, seqlen_k))
    keys = _Keys(k, v, [block for block in blocks if not block.single])
    for block in blocks:
        if block.single:
            o, m = _forward_row(q, k, v, scores, block)
        else:
            mask = None
            if block.masked:
                mask = _toeplitz(scores, block, seqlen_k - seqlen_q, lse.dtype)
            o, m = _forward(
                q[:, block.rows].transpose(1, 2), *keys.of(block), 0.0, block.causal,
                attn_mask=mask, scale=scores.softmax_scale,
            )  # fmt: skip
        out[:, block.rows].copy_(o.transpose(1, 2))
        lse[:, :, block.rows].copy_(m)
    doubtful = _doubtful(lse, first_row)
    if scores.sinks is not None:
        _add_sinks(out[:, first_row:], lse[:, :, first_row:], scores.sinks)
    if first_row:
        no_keys(out[:, :first_row], lse[:, :, :first_row], scores)
    return doubtful


def _doubtful(lse: Tensor, first_row: int) -> Tensor | None:
    """Rows, (b, h, sq) bool, of which a score may be NaN or infinite; None if there are none.

    The kernel takes a row of nothing but NaN for one without keys if the row is shorter than a
    vector, so that out and LSE (b, h, sq) are 0, and its exp for half precision makes 0 of
    infinities. Its masks are sums: they let a NaN behind them through. Each leaves an LSE of 0, NaN
    or infinity, which other rows hardly ever have.
    """
    seeing = lse[:, :, first_row:] if first_row else lse
    one = seeing / seeing  # or NaN: the fewest operations that tell, as short calls feel each
    if one.numel() == 0 or not math.isnan(one.max().item()):
        return None
    doubtful = torch.zeros(lse.shape, dtype=torch.bool)
    doubtful[:, :, first_row:] = one.isnan()
    return doubtful


def _forward_row(q, k, v, scores: Scores, block: Block) -> tuple[Tensor, Tensor]:
    """One row (decoding): query heads of a key head become the rows of one product."""
    shift, kv_heads = k.shape[1] - q.shape[1], k.shape[2]
    mask = None
    if block.masked:
        mask = _toeplitz(scores, block, shift, accumulation_dtype(q.dtype)).flip(3)
        mask = mask.squeeze(2).unflatten(1, (kv_heads, -1))  # (1 or b, hk, g, keys)
    q = q[:, block.rows.start].unflatten(1, (kv_heads, -1))  # (b, hk, g, d)
    k, v = (x[:, block.keys].transpose(1, 2) for x in (k, v))
    o, m = _forward(q, k, v, attn_mask=mask, scale=scores.softmax_scale)
    return o.flatten(1, 2).unsqueeze(2), m.flatten(1, 2).unsqueeze(2)


def _first_row(scores: Scores, seqlen_q: int, seqlen_k: int) -> int:
    """Rows before this one see no key: the kernel would call their LSE 0."""
    return min(seqlen_q, max(0, seqlen_q - seqlen_k - scores.right))


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Takes a sink per head into out (b, s, h, d) and lse (b, h, s), as one more key of value 0."""
    sinks = sinks[:, None]
    out.mul_(torch.sigmoid(lse - sinks).transpose(1, 2)[..., None])
    lse.copy_(torch.logaddexp(lse, sinks))


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, scores: Scores,
) -> None:  # fmt: skip
    """Shapes as in forward, out and lse with sinks; writes those of dq, dk, dv that are not None.

    Half precision goes through float32, a few heads at a time: the kernel sums dK and dV of row
    blocks in the type of its inputs, which loses a digit that the accuracy bar does not allow.
    """
    dtype, grads = accumulation_dtype(q.dtype), (dq, dk, dv)
    if q.dtype == dtype:
        _backward_part(dout, q, k, v, out, lse, grads, scores)
        return
    for bs, qs, hs in converted_parts(q, k):
        queries = (x[bs, :, qs].to(dtype) for x in (dout, q))
        keys = (x[bs, :, hs].to(dtype) for x in (k, v))
        targets = (
            None if x is None else x[bs, :, heads]
            for x, heads in zip(grads, (qs, hs, hs), strict=True)
        )  # fmt: skip
        _backward_part(
            *queries, *keys, out[bs, :, qs].to(dtype), lse[bs, qs], targets, scores.part(bs, qs)
        )


def _backward_part(dout, q, k, v, out, lse, grads, scores: Scores) -> None:
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    shift = seqlen_k - seqlen_q
    dq, dk, dv = grads
    first_row = _first_row(scores, seqlen_q, seqlen_k)
    if dq is not None:
        dq[:, :first_row].zero_()
    blocks = list(_blocks(scores, first_row, seqlen_q, seqlen_k))
    keys = _Keys(k, v, blocks)
    key_sums = _KeySums(dk, dv, k)
    # Last rows first: under a causal mask they see all keys, and their gradients become the sums.
    for block in reversed(blocks):
        mask = _toeplitz(scores, block, shift, lse.dtype) if block.masked else None
        dout_block, q_block, out_block = (x[:, block.rows].transpose(1, 2) for x in (dout, q, out))
        dq_block, *key_grads = kernel_backward(
            dout_block,
            q_block,
            *keys.of(block),
            out_block,
            lse[:, :, block.rows],
            0.0,
            block.causal,
            attn_mask=mask,
            scale=scores.softmax_scale,
        )
        if dq is not None:
            dq[:, block.rows].copy_(dq_block.transpose(1, 2))
        key_sums.add(keys.slice(block), *key_grads)
    key_sums.write(keys.reverse)


class _KeySums:
    """dK and dV, summed over blocks of rows."""

    def __init__(self, dk: Tensor | None, dv: Tensor | None, like: Tensor):
        self.targets = (dk, dv)
        self.sums: list[Tensor | None] = [None, None]  # (b, hk, sk, d)
        self.shape = like.transpose(1, 2).shape

    def add(self, keys: slice, *grads: Tensor) -> None:
        for i, (target, grad) in enumerate(zip(self.targets, grads, strict=True)):
            if target is None:
                continue
            if self.sums[i] is None:
                if grad.shape == self.shape:
                    self.sums[i] = grad
                    continue
                self.sums[i] = grad.new_zeros(self.shape)
            self.sums[i][:, :, keys].add_(grad)

    def write(self, reverse: bool) -> None:
        for target, total in zip(self.targets, self.sums, strict=True):
            if target is None:
                continue
            if total is None:
                target.zero_()
            else:
                target.copy_((total.flip(2) if reverse else total).transpose(1, 2))
