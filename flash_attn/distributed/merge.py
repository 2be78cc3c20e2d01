"""Attention over disjoint keys, merged by the log-sum-exps of its parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROWS = 2048  # rows merged at a time, so that what is computed in between stays small

_library = torch.library.Library("flash_attn", "FRAGMENT")
_library.define(
    "merge_attention(Tensor(a!) out_a, Tensor(b!) lse_a, Tensor out_b, Tensor lse_b) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Merges part b into part a, in place: no copy of an output is kept.

    The whole is the parts' average with weights exp(lse_part - lse). A row that sees nothing, with
    LSE -inf and output 0, counts for nothing; what the output of part b is there does not matter.

    Arguments:
        out_a: (batch, rows, heads, head_dim), overwritten. Its dtype, that of out_b or a wider one,
            is what each merge rounds to; the arithmetic is that of the LSE.
        lse_a: (batch, heads, rows), float32 (float64 for float64 outputs), overwritten.
        out_b, lse_b: of the same shapes.

    None of them is recorded for a backward.
    """
    if out_a.shape != out_b.shape:
        raise ValueError(f"out_b: got shape {tuple(out_b.shape)}; that of out_a is needed")
    shape = (out_a.shape[0], out_a.shape[2], out_a.shape[1])
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(lse.shape) != shape:
            raise ValueError(f"{name}: got shape {tuple(lse.shape)}; {shape} is needed")
    with torch.no_grad():
        torch.ops.flash_attn.merge_attention(out_a, lse_a, out_b, lse_b)


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    lse = torch.logaddexp(lse_a, lse_b)
    # exp(-inf - -inf): part b has no share in a row that nobody sees.
    share = (lse_b - lse).exp_().masked_fill_(lse_b == -math.inf, 0.0)
    share = share.transpose(1, 2).unsqueeze(-1)  # (b, rows, h, 1)
    for start in range(0, out_a.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        mine, weight = out_a[:, rows], share[:, rows]
        difference = (out_b[:, rows] - mine.to(lse.dtype)).mul_(weight)
        # 0 times a NaN of a row that counts for nothing
        mine.add_(difference.masked_fill_(weight == 0, 0.0))
    lse_a.copy_(lse)


_library.impl("merge_attention", _merge, "CompositeExplicitAutograd")


@torch.library.register_fake("flash_attn::merge_attention", lib=_library)
def _fake_merge(out_a, lse_a, out_b, lse_b) -> None:
    return None
