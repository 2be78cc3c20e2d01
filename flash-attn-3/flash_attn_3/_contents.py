"""What index tensors contain, where this distribution works with them before an operation does.

It is looked at on a CPU always, and on a GPU with FLASH_ATTN_CHECK=1, as ``flash_attn`` does;
otherwise nothing is read back, and what lies outside is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn import backend
from flash_attn.cpu.paging import Pages
from flash_attn.cpu.seqlens import checked_offsets
from flash_attn.dispatch import content_checks


def can_look(x: Tensor) -> bool:
    """Whether what a tensor contains is there, and may be waited for."""
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    return x.is_cpu or (backend.CHECK and content_checks.can_look(x))


def rows_in_use(seqused_q: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """seqused_q (b,), none more than the rows that there are."""
    fit = torch.minimum(seqused_q.clamp(min=0), cu_seqlens_q.diff())
    if can_look(seqused_q) and not torch.equal(seqused_q, fit):
        raise ValueError(
            f"seqused_q: got {seqused_q.tolist()}; 0 or more is needed, and at most the rows that "
            f"cu_seqlens_q gives the sequences, {cu_seqlens_q.diff().tolist()}"
        )
    return fit


def cache_rows(cache_batch_idx: Tensor, rows: int) -> None:
    """Raises for what is no row of a cache."""
    if not can_look(cache_batch_idx):
        return
    for i, row in enumerate(cache_batch_idx.tolist()):
        if not 0 <= row < rows:
            raise ValueError(
                f"cache_batch_idx[{i}]: got {row}; 0 to {rows - 1}, a row of k_cache, is needed"
            )


def cache_lengths(cache_seqlens: Tensor) -> None:
    if not can_look(cache_seqlens):
        return
    for i, length in enumerate(cache_seqlens.tolist()):
        if length < -1:
            raise ValueError(f"cache_seqlens[{i}]: got {length}; -1 (skip) or more is needed")


def first_positions(rotary_seqlens: Tensor, old: Tensor) -> None:
    """Raises for negative ones of sequences that are not left out (old: -1)."""
    if can_look(rotary_seqlens) and bool(((rotary_seqlens < 0) & (old >= 0)).any()):
        raise ValueError(f"rotary_seqlens: got {rotary_seqlens.tolist()}; 0 or more is needed")


def positions(position: Tensor, cos: Tensor) -> None:
    """Raises for one beyond the rotary table."""
    if can_look(position) and (needed := int(position.max()) + 1) > cos.shape[0]:
        raise ValueError(f"rotary_cos: got {cos.shape[0]} positions; {needed} are needed")


def appended(
    caches: tuple[Tensor, Tensor], total: int, cu_seqlens: Tensor, start: Tensor, table: Tensor
) -> None:
    """Raises for an append that does not go where it says; see ``_rows.append``."""
    if not can_look(start):
        return
    ends = checked_offsets("cu_seqlens_k_new", cu_seqlens, total, None, "")
    lengths = [
        old + last - first if old >= 0 else 0
        for old, first, last in zip(start.tolist(), ends, ends[1:])
    ]
    pages = Pages(*caches, table)
    if max(lengths, default=0) > pages.capacity:
        raise ValueError(
            f"cache_seqlens and cu_seqlens_k_new ask for more than the {pages.capacity} keys that "
            "the cache holds per sequence"
        )
    pages.check(lengths)
