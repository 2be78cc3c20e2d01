"""Attention over disjoint keys, merged by the log-sum-exps of its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.api import checks
from flash_attn.call import accumulation_dtype
from flash_attn.dispatch import ops, run


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None = None
) -> None:
    """Merges part b into part a, in place: no copy of an output is kept.

    The whole is the parts' average with weights exp(lse_part - lse). A row that sees nothing, with
    LSE -inf and output 0, counts for nothing; what the output of part b is there does not matter.

    Arguments:
        out_a: (batch, rows, heads, head_dim), overwritten unless there is ``out``; in out_b's dtype
            or the LSE's.
        lse_a: (batch, heads, rows), float32 (float64 for float64 outputs), overwritten.
        out_b, lse_b: of the same shapes. All may be slices of rows of larger tensors.
        out: where the merged output goes instead, in out_b's dtype or the LSE's. The arithmetic is
            that of the LSE; a merge rounds to the dtype of what it writes.

    Not recorded for a backward. Raises TypeError for what is no tensor, ValueError for other shapes
    and dtypes.
    """
    outs = {"out_a": out_a, "out_b": out_b, "out": out_a if out is None else out}
    lses = {"lse_a": lse_a, "lse_b": lse_b}
    for name, x in (outs | lses).items():
        checks.tensor(x, name)
    for name, x in outs.items():
        if x.shape != out_a.shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}; that of out_a is needed")
    if out_a.dim() != 4:
        raise ValueError(
            f"out_a: got shape {tuple(out_a.shape)}; (batch, rows, heads, head_dim) is needed"
        )
    shape, dtype = (out_a.shape[0], out_a.shape[2], out_a.shape[1]), accumulation_dtype(out_b.dtype)
    for name, x in lses.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}; {shape} is needed")
        if x.dtype != dtype:
            raise ValueError(f"{name}: got dtype {x.dtype}; {dtype} is needed")
    for name, x in outs.items():
        if x.dtype not in (out_b.dtype, dtype):
            raise ValueError(
                f"{name}: got dtype {x.dtype}; that of out_b, {out_b.dtype}, or {dtype} is needed"
            )
    with torch.no_grad():
        run.writing(ops.merge_attention, out_a, lse_a, out_b, lse_b, out=out)
