"""``cu_seqlens`` without its leading 0, as ``lengths.cumsum(0)`` has none: a warning, no error.

It is the commonest mistake with varlen calls, and silent: the first sequence gets zeros and no
gradient. A ``cu_seqlens`` that begins later than at 0 may also be a slice of a longer one, with the
whole q, k and v, for a part of a batch. Such a slice lies after the beginning of the longer
tensor's memory, or it ends before the rows do. A copy of a slice up to the last sequence looks like
the mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn import backend
from flash_attn.api.warn import warn_once
from flash_attn.call import Lengths

_looked_at: set[tuple] = set()


def warn(name: str, cu_seqlens: Tensor, first: int, last: int, rows: int) -> None:
    """Warns once, if the 0 is missing. first, last: of cu_seqlens. rows: of the packed tensor."""
    if _is_missing(cu_seqlens, first, last, rows):
        warn_once(_message(name, first), about="cu_seqlens without its leading 0")


def log(q: Tensor, k: Tensor, lengths: Lengths, paged: bool) -> None:
    """Logs the mistake, of the first call of each kind: to look is to wait for the GPU."""
    kind = lengths.cu_seqlens_q.shape, q.shape[1:], k.shape[1:]
    if kind in _looked_at or not _has_contents(lengths.cu_seqlens_q):
        return
    _looked_at.add(kind)
    rows = {"cu_seqlens_q": q.shape[0]}
    if not paged:
        rows["cu_seqlens_k"] = k.shape[0]
    for name, total in rows.items():
        cu_seqlens = getattr(lengths, name)
        first, last = cu_seqlens[0].item(), cu_seqlens[-1].item()
        if _is_missing(cu_seqlens, first, last, total):
            backend.trace(_message(name, first))
            return


def _has_contents(x: Tensor) -> bool:
    if type(x) is not Tensor or torch._C._are_functorch_transforms_active():
        return False
    return x.is_cpu or (x.is_cuda and not torch.cuda.is_current_stream_capturing())


def _is_missing(cu_seqlens: Tensor, first: int, last: int, rows: int) -> bool:
    return first > 0 and last == rows and cu_seqlens.storage_offset() == 0


def _message(name: str, first: int) -> str:
    return (
        f"{name} begins at {first}, not at 0: rows 0 to {first - 1} are in no sequence, their "
        "output is 0 and their gradients are 0. Was the leading 0 forgotten? "
        "cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()"
    )
