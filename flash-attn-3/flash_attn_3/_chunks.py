"""``attention_chunk``: sequences are cut where chunks end, and each part is a sequence of its own.

Chunk n of a sequence is its keys n · chunk to (n + 1) · chunk - 1, and the rows at their positions.
Masks are aligned to a sequence's last row and last key. Both of a part have one position, so causal
masks, windows and ALiBi mean in a part what they mean in the whole.

How many parts there are follows from shapes; where they begin is worked out where lengths are, and
what is too many is empty. Nothing here waits for a GPU, unless FLASH_ATTN_CHECK=1 asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn.api import checks
from flash_attn.call import Keys, Lengths, Options
from flash_attn.cpu.varlen import locate
from flash_attn.dispatch import calls
from flash_attn_3 import _contents, _rows


def checked(attention_chunk: Any) -> int:
    """Positions of a chunk; 0, or None, is no chunks."""
    chunk = 0 if attention_chunk is None else checks.integer(attention_chunk, "attention_chunk")
    if chunk < 0:
        raise ValueError(
            f"attention_chunk: got {chunk}; positions of a chunk are needed, or 0 for no chunks"
        )
    return chunk


def hides_keys(chunk: int, longest_k: int, rows_before_keys: bool) -> bool:
    """Whether chunks change which keys rows see, as far as shapes tell.

    rows_before_keys: there may be rows left of the first key's position, whose chunk has no keys,
        and which would see some by another mask.
    """
    return chunk > 0 and (chunk < longest_k or rows_before_keys)


def beginning(total: Tensor, leftpad: Tensor | None, chunk: int) -> Tensor:
    """Where the chunk of the last of total (b,) keys begins, for one row; (b,) int32."""
    pad = torch.zeros_like(total) if leftpad is None else leftpad
    return pad + (total - 1 - pad).clamp(min=0) // chunk * chunk


def as_sequences(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, keys: Keys, options: Options,
    seqused_q: Tensor | None, chunk: int, aligned: bool,
    take: Callable[..., None] = checks.operands,
) -> tuple[Lengths, Keys, Options]:  # fmt: skip
    """A packed call as one in which all rows are in use, and see all chunks.

    aligned: no sequence has more rows than keys, as far as lengths say. take: the check of q, k and
    v by themselves.
    """
    look = _contents.can_look(lengths.cu_seqlens_q)
    if chunk or (look and seqused_q is not None):
        _, lengths = calls.checked(q, k, v, checks.flags(options), lengths, keys, take=take)
        if look:  # while they are the caller's
            longest = lengths.max_seqlen_q if seqused_q is None else q.shape[0]
            locate(q, k, v, lengths._replace(max_seqlen_q=longest), keys)
    longest_q = lengths.max_seqlen_q
    aligned = aligned or lengths.cu_seqlens_q is lengths.cu_seqlens_k
    if seqused_q is not None or any(x is not None for x in keys):
        aligned = False
    if seqused_q is not None:
        lengths, keys, options = _rows.only_used(q, seqused_q, lengths, keys, options)
    if chunk:
        return _cut(k, lengths, keys, options, chunk, longest_q, aligned)
    return lengths, keys, options


def _cut(
    k: Tensor, lengths: Lengths, keys: Keys, options: Options, chunk: int, longest_q: int,
    aligned: bool,
) -> tuple[Lengths, Keys, Options]:  # fmt: skip
    """The same call, of as many sequences as there are chunks.

    Arguments:
        k: (total_k, hk, d), or pages (num_pages, page_size, hk, d).
        lengths: with ints.
        longest_q: rows of a sequence that has keys; those without may be longer.
        aligned: no sequence has more rows than keys.
    """
    cu_q, cu_k, most_q, most_k = lengths
    table, leftpad, used = keys
    # Rows left of the first key. A causal mask hides keys from them in the first chunk, too;
    # otherwise they are a part without keys.
    apart = not (aligned or options.causal or longest_q <= 1)
    if options.batch_invariant and table is not None and chunk % k.shape[1]:
        # Chunks that begin within a page are served by other kernels than those that do not.
        raise NotImplementedError(
            f"attention_chunk: got {chunk} with batch_invariant=True and pages of {k.shape[1]} "
            "rows; a multiple of the rows of a page is needed"
        )
    if not hides_keys(chunk, most_k, apart):
        return lengths, keys, options
    capacity = k.shape[0] if table is None else table.shape[1] * k.shape[1]
    chunk = min(chunk, max(capacity, 1))
    seqlen_k = _seqlen_k(lengths, keys)
    before = seqlen_k - cu_q.diff()  # the position of the first row
    parts = max(-(-most_k // chunk), 1)
    first = torch.zeros_like(before)
    if table is not None:  # chunks without rows need not be there
        parts = min(parts, (max(longest_q, 1) + chunk - 2) // chunk + 1)
        first = before.clamp(min=0) // chunk
    step = torch.arange(-1 if apart else 0, parts + 1, dtype=torch.int32, device=cu_q.device)
    parts = step.shape[0] - 1
    at = ((first[:, None] + step) * chunk).clamp(min=0)
    at = torch.minimum(at, seqlen_k[:, None])  # (b, parts + 1): keys where parts begin and end
    rows = (at[:, 1:-1] - before[:, None]).clamp(min=0)
    rows = torch.nn.functional.pad(rows, (1, 0))  # (b, parts): rows where parts begin
    cu_q = _rows.joined(cu_q[:-1, None] + rows, cu_q)
    if table is None:
        begin = cu_k[:-1] if leftpad is None else cu_k[:-1] + leftpad
        length = None if leftpad is used is None else at.diff().flatten()
        cu_k, keys = _rows.joined(begin[:, None] + at[:, :-1], cu_k), Keys(seqused_k=length)
    else:
        cu_k, keys = cu_q, _pages(at, keys, k.shape[1], chunk)
    slopes = options.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        options = options._replace(alibi_slopes=slopes.repeat_interleave(parts, 0))
    most_q = min(most_q, chunk) if aligned else most_q
    return Lengths(cu_q, cu_k, most_q, min(most_k, chunk)), keys, options


def _seqlen_k(lengths: Lengths, keys: Keys) -> Tensor:
    """(b,): the keys of each sequence that rows may see."""
    seqlen_k = keys.seqused_k
    if seqlen_k is None or keys.block_table is None:
        slots = lengths.cu_seqlens_k.diff()
        seqlen_k = slots if seqlen_k is None else torch.minimum(seqlen_k, slots)
    if keys.leftpad_k is not None:
        seqlen_k = seqlen_k - keys.leftpad_k
    return seqlen_k.clamp(min=0)


def _pages(at: Tensor, keys: Keys, page_size: int, chunk: int) -> Keys:
    """The pages of each chunk, from its first key's on; at (b, chunks + 1).

    What lies before that key on its page is left padding, which Hopper's own kernels do not take:
    there is none where chunks are whole pages.
    """
    table, leftpad, _ = keys
    begin, length = at[:, :-1], at.diff()
    pad = None
    columns = chunk // page_size
    if leftpad is not None or chunk % page_size:
        begin = begin if leftpad is None else begin + leftpad[:, None]
        pad = begin % page_size
        length = length + pad
        columns = (chunk + page_size - 2) // page_size + 1
    columns = min(columns, table.shape[1])
    column = torch.arange(columns, device=table.device) + (begin // page_size)[:, :, None]
    column = column.clamp(max=table.shape[1] - 1).flatten(1)
    table = table.gather(1, column).view(-1, columns)
    return Keys(table, None if pad is None else pad.flatten(), length.flatten())
