"""What the ops share around the attention itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attn.call import Forward

from .sinks import sink_share

ROWS = 1024  # rows converted at a time, so that no full-size copy in the accumulation type is made


def draw_rng_state(dropout_p: float, rng_state: Tensor | None) -> Tensor:
    """The op's rng_state result: int64 (2,) = [seed, offset], or (0,) without dropout."""
    if dropout_p == 0.0:
        return torch.empty(0, dtype=torch.int64)
    if rng_state is None:
        return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64)
    return rng_state.clone()


def softmax_delta(dout: Tensor, out: Tensor, dlse: Tensor | None, softmax_d: Tensor) -> None:
    """softmax_d (..., s, h) = rowsum(dO * O) - dlse;  dout, out (..., s, h, dv).

    dlse has the layout of LSE: (..., h, s).
    """
    for start in range(0, out.shape[-3], ROWS):
        rows = slice(start, start + ROWS)
        product = dout[..., rows, :, :].to(softmax_d.dtype) * out[..., rows, :, :]
        softmax_d[..., rows, :] = product.sum(-1)
    if dlse is not None:
        softmax_d.sub_(dlse.transpose(-1, -2))


def max_of_heads(rows: Tensor) -> Tensor:
    """(h,) of rows' largest logits, (b, h, s) or packed (h, total)."""
    if rows.numel() == 0:
        return rows.new_full((rows.shape[-2],), -math.inf)
    return rows.amax((0, 2) if rows.dim() == 3 else 1)


def max_logits_output(call: Forward, rows: Tensor) -> Tensor:
    """The op's score_output of a call that asks for them."""
    return max_of_heads(rows) if call.max_logits_of_heads else rows


def sink_gradient(s_aux: Tensor, lse: Tensor, softmax_d: Tensor, head_dim: int) -> Tensor:
    """ds_aux (h,) = sum over rows of -p_sink * softmax_d, p_sink = exp(s_aux - lse).

    lse and softmax_d have their heads in dimension head_dim.
    """
    lse, softmax_d = (x.movedim(head_dim, -1) for x in (lse, softmax_d))
    p_sink = sink_share(s_aux, lse)
    products = torch.where(p_sink == 0, 0.0, p_sink * softmax_d)
    return products.flatten(0, -2).sum(0).neg_()
