"""Keys and values held in pages: reading one sequence's keys, writing new ones."""

from __future__ import annotations

import torch
from torch import Tensor


class Pages:
    """k, v (num_pages, page_size, hk, d) and block_table (b, pages_per_sequence), int32.

    A table entry of -1 is a page that does not exist: it is neither read nor written.
    """

    k: Tensor
    v: Tensor

    def __init__(self, k: Tensor, v: Tensor, block_table: Tensor):
        self.k, self.v = k, v
        self.page_size: int = k.shape[1]
        self.table = block_table
        self.capacity: int = block_table.shape[1] * self.page_size

    def check(self, lengths: list[int]) -> None:
        """Table entries that hold one of a sequence's `lengths` positions must be pages, or -1."""
        # Entries past the length belong to no sequence, and may be anything.
        for i, length in enumerate(lengths):
            used = self.table[i, : -(-max(length, 0) // self.page_size)]
            if used.numel() == 0:
                continue
            lowest, highest = (x.item() for x in torch.aminmax(used))
            if lowest < -1 or highest >= self.k.shape[0]:
                bad = lowest if lowest < -1 else highest
                raise ValueError(
                    f"block_table[{i}]: got page {bad}; -1 (no page) to {self.k.shape[0] - 1} is "
                    "needed"
                )

    def check_append(self, live: list[int], old: list[int], leftpad: list[int], new: int) -> None:
        """Pages that get new keys must belong to one sequence, and to one place in it.

        A sequence that shares such a page, and appends too, writes or reads there: if it ends
        after the other's new keys it reads them, and otherwise the other one reads its own.
        """
        size = self.page_size
        used, written = [], []
        for i in live:
            first, end = old[i] // size, -(-(old[i] + new) // size)
            used.append(self.table[i, min(leftpad[i], old[i]) // size : end])
            written.append(self.table[i, first:end])
        if not live:
            return
        targets = torch.cat(written)
        targets = targets[targets >= 0]
        uses = torch.cat(used)
        uses = uses[torch.isin(uses, targets)]
        if uses.numel() == targets.numel() == torch.unique(targets).numel():
            return
        pages, counts = torch.unique(uses, return_counts=True)
        page = pages[counts > 1][0].item()
        users = [i for i, held in zip(live, used, strict=True) if (held == page).any()]
        raise ValueError(
            f"block_table: got page {page}, to which new keys go, more than once, for sequences "
            f"{users}; a page of its own is needed"
        )

    def read(self, index: int, keys: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys [start, stop) of a sequence: k, v (1, length, hk, d), and which are missing.

        The third result is None, or bool (length,): True where the page does not exist.
        """
        pages, at = self._pages(index, keys)
        k, v = (_rows(x, pages, at)[None] for x in (self.k, self.v))
        missing = pages < 0
        hidden = missing.repeat_interleave(self.page_size)[at] if missing.any() else None
        return k, v, hidden

    def rows(self, x: Tensor, index: int, keys: slice) -> Tensor:
        """Those of a sequence's keys, (length, …), of x (num_pages, page_size, …); 0 where the page
        does not exist."""
        return _rows(x, *self._pages(index, keys))

    def _pages(self, index: int, keys: slice) -> tuple[Tensor, slice]:
        """The pages that hold a sequence's keys, and where among their rows these are."""
        size = self.page_size
        first, last = keys.start // size, -(-keys.stop // size)
        at = slice(keys.start - first * size, keys.stop - first * size)
        return self.table[index, first:last].long(), at

    def write(self, index: int, start: int, k: Tensor, v: Tensor) -> None:
        """Writes new keys k, v (length, hk, d) at positions start, start + 1, ... of a sequence."""
        positions = torch.arange(start, start + k.shape[0])
        pages = self.table[index, positions // self.page_size].long()
        slots = positions % self.page_size
        exists = pages >= 0
        if not exists.all():
            pages, slots, k, v = pages[exists], slots[exists], k[exists], v[exists]
        self.k[pages, slots] = k
        self.v[pages, slots] = v


def _rows(x: Tensor, pages: Tensor, at: slice) -> Tensor:
    """Rows of some pages of x (num_pages, page_size, …), one page after the other: (length, …)."""
    missing = pages < 0
    if not missing.any():
        return x.index_select(0, pages).flatten(0, 1)[at]
    rows = x.index_select(0, pages.clamp(min=0))
    plain = rows.view(torch.uint8) if x.itemsize == 1 else rows  # torch fills no float8
    # Only the score is masked later; a value there must not be NaN.
    plain[missing] = 0
    return rows.flatten(0, 1)[at]
