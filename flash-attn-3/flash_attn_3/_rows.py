"""Packed batches: rows in use, caches as pages, new keys of different lengths.

What tensors contain is worked with where it is: nothing here waits for a GPU, unless
FLASH_ATTN_CHECK=1 asks for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.api import checks
from flash_attn.call import FP8, Descale, Descales, Keys, Lengths, Options
from flash_attn.cpu.fp8 import encoded
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn_3 import _contents


def ends(batch: int, rows: int, like: Tensor) -> Tensor:
    """cu_seqlens (batch + 1,) of sequences of as many rows each."""
    return torch.arange(batch + 1, dtype=torch.int32, device=like.device) * rows


def only_used(
    q: Tensor, seqused_q: Tensor, lengths: Lengths, keys: Keys, options: Options
) -> tuple[Lengths, Keys, Options]:
    """The same call, of twice as many sequences: the rows in use of each, then its other rows.

    The others see no key, so their output is 0, their log-sum-exp -inf and their gradients 0.
    """
    cu_q, cu_k, _, max_k = lengths
    checks.per_sequence(seqused_q, "seqused_q", lengths.batch, q)
    seqused_q = _contents.rows_in_use(seqused_q, cu_q)
    cu_q = joined(_alternate(cu_q[:-1], cu_q[:-1] + seqused_q), cu_q)
    table, leftpad, used = keys
    if table is not None and used is None:
        used = cu_k.diff()
    cu_k = torch.cat([cu_k[:1], cu_k[1:].repeat_interleave(2)])
    keys = Keys(
        None if table is None else table.repeat_interleave(2, 0),
        None if leftpad is None else _alternate(leftpad, torch.zeros_like(leftpad)),
        None if used is None else _alternate(used, torch.zeros_like(used)),
    )
    slopes = options.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        options = options._replace(alibi_slopes=slopes.repeat_interleave(2, 0))
    # The rows that are not in use may be more than those of the longest sequence in use.
    return Lengths(cu_q, cu_k, q.shape[0], max_k), keys, options


def joined(starts: Tensor, cu_seqlens: Tensor) -> Tensor:
    """cu_seqlens of more sequences: where they begin, and the end that it has.

    It is a slice, as the caller's may be: a tensor of its own that begins past 0 is taken for one
    that lacks the leading 0.
    """
    return torch.cat([cu_seqlens[:1], starts.flatten(), cu_seqlens[-1:]])[1:]


def _alternate(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], 1).flatten()


def of_parts(descale: Descale, parts: int) -> Descale:
    """For a call of so many sequences in the place of each: of (b, hk) its rows, repeated."""
    if isinstance(descale, Tensor) and descale.dim() == 2 and parts > 1:
        return descale.repeat_interleave(parts, 0)
    return descale


def as_pages(cache: Tensor, batch: int, kv_batch_idx: Tensor | None) -> Tensor:
    """The page table (batch, 1) that makes a page of each row of a cache (rows, seqlen, hk, d)."""
    if kv_batch_idx is not None:
        checks.per_sequence(kv_batch_idx, "cache_batch_idx", batch, cache)
        _contents.cache_rows(kv_batch_idx, cache.shape[0])
        return kv_batch_idx[:, None].contiguous()
    if cache.shape[0] != batch:
        raise ValueError(
            f"k_cache: got batch {cache.shape[0]}; without cache_batch_idx and page_table it must "
            f"be that of q, {batch}"
        )
    return torch.arange(batch, dtype=torch.int32, device=cache.device)[:, None]


def places(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each packed row's sequence, its place in that, and whether it is of any; (rows,) each."""
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True, out_int32=True)
    sequence = sequence.clamp(max=max(cu_seqlens.shape[0] - 2, 0))
    of_any = (row >= cu_seqlens[0]) & (row < cu_seqlens[-1])
    return sequence, row - cu_seqlens[:-1][sequence], of_any


def turned(
    x: Tensor, cu_seqlens: Tensor, start: Tensor, cos: Tensor, sin: Tensor, interleaved: bool,
    together: bool = False,
) -> Tensor:  # fmt: skip
    """x (rows, h, d) turned at the positions start + 0, 1, … of each sequence, start (b,) int32.

    together: all rows of a sequence at start.
    """
    if x.shape[0] == 0 or start.shape[0] == 0:
        return x
    sequence, place, of_any = places(cu_seqlens, x.shape[0])
    position = start[sequence] + (torch.zeros_like(place) if together else place)
    position = torch.where(of_any & (start[sequence] >= 0), position, 0)
    _contents.positions(position, cos)
    if not position.is_cpu:  # where torch turns in the kernel's place, a row outside is an assert
        position = position.clamp(max=max(cos.shape[0] - 1, 0))
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return apply_rotary_emb(x[:, None], cos, sin, interleaved, seqlen_offsets=position)[:, 0]


def append(
    caches: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], cu_seqlens: Tensor, start: Tensor,
    table: Tensor, descales: Descales,
) -> None:  # fmt: skip
    """Writes packed rows to the positions start + 0, 1, … of each sequence.

    Arguments:
        caches: pages (num_pages, page_size, hk, d), for k and for v.
        new: (total_new, hk, d), for k and for v.
        cu_seqlens: (b + 1,) int32, of new.
        start: (b,) int32; -1 leaves a sequence out.
        table: (b, pages) int32; -1 is no page, and what would go there is dropped.
        descales: of caches of codes.

    Raises:
        ValueError: more rows than there is room for, or no such page. Where contents are not
            looked at such rows are dropped.
    """
    total, page_size, columns = new[0].shape[0], caches[0].shape[1], table.shape[1]
    if 0 in (total, start.shape[0], columns, caches[0].shape[0]):
        return
    _contents.appended(caches, total, cu_seqlens, start, table)
    sequence, place, kept = places(cu_seqlens, total)
    kept = kept & (start[sequence] >= 0)
    at = start[sequence] + place
    fits = (at >= 0) & (at < columns * page_size)
    page = table[sequence, (at // page_size).clamp(0, columns - 1)]
    kept = kept & fits & (page >= 0) & (page < caches[0].shape[0])
    # Rows that go nowhere repeat one that goes somewhere; if none does, the cache's own.
    source = torch.where(kept, torch.arange(total, device=at.device), kept.int().argmax())
    page = page.clamp(0, caches[0].shape[0] - 1)[source]
    at = (at % page_size)[source]
    scales = zip(descales[:2], descales[2:])
    for cache, x, (descale, number) in zip(caches, new, scales, strict=True):
        rows = x[source]
        if cache.dtype is FP8:
            scale = torch.full((), number, dtype=torch.float32, device=x.device)
            if descale is not None:
                of_rows = descale.dim() == 3
                scale = scale * (descale[page, at] if of_rows else descale[sequence[source]])
            # As bytes: not every operation of torch takes codes.
            rows, cache = encoded(rows, scale).view(torch.uint8), cache.view(torch.uint8)
        cache[page, at] = torch.where(kept.any(), rows, cache[page, at])
