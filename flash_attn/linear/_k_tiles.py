"""Calls of the library's linear attention, for K of any size: one call for each tile of K.

Each row of a state [K, V] decays by itself, so each tile of the rows is a state of its own, and o
is the sum of what these states give. A call of the library takes ``_kernels.most_columns`` columns
of k at most. o and dv are summed over the tiles in fp32, after each call has rounded its own to 16
bits (in fp16 each of them has to be finite). All other results belong to one tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn.dispatch.autograd import rows_contiguous
from flash_attn.linear import _kernels
from flash_attn.linear._chunks import Gradients, Scan

__all__ = ["backward", "forward", "written"]


def forward(scan: Scan, final: Tensor | None) -> Tensor:
    """o [B, T, H, V]; writes the final state [N, H, K, V], if it is wanted."""
    total = None
    for columns in _k_tiles("_linear_forward", scan):
        o, rows = written(scan.v, scan.cu_seqlens), _rows(final, columns)
        state = _kernels.laid_well(rows)
        _kernels.forward(*_aligned(_cut(scan, columns)), o, state)
        if state is not rows:
            rows.copy_(state)
        total = _sum(total, o)
    return total.to(scan.v.dtype)


def backward(
    scan: Scan, do: Tensor, dfinal: Tensor | None, with_dg: bool, with_dstate: bool
) -> Gradients:
    do = rows_contiguous(do)
    found = [
        _backward(_cut(scan, columns), do, _rows(dfinal, columns), with_dg, with_dstate)
        for columns in _k_tiles("_linear_backward", scan)
    ]
    if len(found) == 1:
        return found[0]
    dv = None
    for tile in found:
        dv = _sum(dv, tile.dv)
    return Gradients(
        torch.cat([tile.dq for tile in found], -1),
        torch.cat([tile.dk for tile in found], -1),
        dv.to(scan.v.dtype),
        None if found[0].dg is None else torch.cat([tile.dg for tile in found], -1),
        None
        if found[0].dinitial_state is None
        else torch.cat([tile.dinitial_state for tile in found], 2),
    )


def _backward(
    scan: Scan, do: Tensor, dfinal: Tensor | None, with_dg: bool, with_dstate: bool
) -> Gradients:
    """The gradients of one tile of K."""
    cu_seqlens, v, channels = scan.cu_seqlens, scan.v, scan.k.shape[-1]
    is_shared = scan.k.shape[2] != v.shape[2]
    dtype = torch.float32 if is_shared else v.dtype
    dq, dk = (written(v, cu_seqlens, channels, dtype=dtype) for _ in range(2))
    dv, dg, dstate = written(v, cu_seqlens), None, None
    if with_dg and scan.g is not None:
        gates = v if scan.g.dim() == 4 else v[..., 0]
        last = (channels,) if scan.g.dim() == 4 else ()
        dg = written(gates, cu_seqlens, *last, dtype=torch.float32)
    if with_dstate and scan.initial_state is not None:
        dstate = _kernels.laid_well(torch.empty_like(scan.initial_state))
    dfinal = _kernels.laid_well(dfinal)
    _kernels.backward(*_aligned(scan), do, dfinal, dq, dk, dv, dg, dstate)
    return Gradients(dq, dk, dv, dg, dstate)


def _k_tiles(operation: str, scan: Scan) -> list[slice]:
    """Ranges of k's columns."""
    columns = scan.k.shape[-1]
    most = min(_kernels.most_columns(operation, scan.q, scan.v, scan.g), columns)
    return [slice(begin, min(begin + most, columns)) for begin in range(0, columns, most)]


def _cut(scan: Scan, columns: slice) -> Scan:
    """The same scan with some of k's columns, and the scale of all columns."""
    if columns == slice(0, scan.k.shape[-1]):
        return scan
    g = scan.g[..., columns] if scan.g is not None and scan.g.dim() == 4 else scan.g
    q, k, state = scan.q[..., columns], scan.k[..., columns], _rows(scan.initial_state, columns)
    return scan._replace(q=q, k=k, g=g, initial_state=state)


def _rows(state: Tensor | None, columns: slice) -> Tensor | None:
    """[N, H, K, V] -> [N, H, tile, V]"""
    return None if state is None else state[:, :, columns]


def _aligned(scan: Scan) -> Scan:
    q, k, v = (rows_contiguous(x) for x in (scan.q, scan.k, scan.v))
    g = None if scan.g is None else scan.g.contiguous()
    state = _kernels.laid_well(scan.initial_state)
    return scan._replace(q=q, k=k, v=v, g=g, initial_state=state)


def written(like: Tensor, cu_seqlens: Tensor | None, *last: int, dtype: Any = None) -> Tensor:
    """Memory for what a kernel writes: zeros where it may have tokens of no sequence."""
    shape = (*like.shape[: like.dim() - len(last)], *last)
    make = like.new_empty if cu_seqlens is None else like.new_zeros
    return make(shape, dtype=dtype)


def _sum(total: Tensor | None, x: Tensor) -> Tensor:
    return x if total is None else total.float() + x
