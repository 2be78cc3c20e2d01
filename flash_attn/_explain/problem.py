"""A call, reduced to what decides which code serves it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn.call import UNCOUNTED, Contents

from .codes import Way
from .explanation import Explanation


@dataclass(frozen=True)
class Problem:
    """A call, reduced to what decides which code serves it."""

    operation: str
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    window_size: tuple[int, int]
    extras: tuple[str, ...]  # the names of the options that are in use
    packed: bool  # sequences lie one after the other
    batch: int
    longest_q: int  # queries that a sequence can have
    capacity: int  # keys that a sequence can have
    cached: bool
    num_splits: int
    batch_invariant: bool
    softcap: float
    deterministic: bool
    left_padded: bool  # the keys of a cache
    used_k: bool  # a tensor says how many keys are in use
    contents: Contents  # of keys
    way: Way | None = None  # of codes of q, k and v
    sm_margin: int = 0  # SMs that the call leaves to others
    notes: tuple[str, ...] = ()  # of what the call does beside attention
    gpu: str | None = None  # the name of one to ask about in place of q's device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the queries that a kernel gets."""
        return self.q.dtype if self.way is None else self.way.dtype

    @property
    def products(self) -> bool:
        """Whether codes of q and k are multiplied as they are."""
        return self.contents == Contents.PRODUCTS

    @property
    def codes(self) -> bool:
        """Whether a cache holds codes of 8 bits."""
        return self.contents in (Contents.CODES, Contents.CODES_OF_ROWS)

    @property
    def latent(self) -> bool:
        """Whether a cache holds latent rows, and the call has a qv."""
        return self.contents == Contents.LATENT

    @property
    def backward(self) -> bool:
        return self.operation.endswith("backward")

    @property
    def page_size(self) -> int:
        """0: keys are not in pages. 1 also where Hopper's boxes of more rows do not suit them: with
        left padding, or strides by which rows cannot be numbered."""
        if "paged" not in self.extras:
            return 0
        boxes = not self.left_padded and self.numbered
        return self.k.shape[1] if boxes else 1

    @property
    def numbered(self) -> bool:
        """Whether the rows of all batch entries, or pages, of k and v can be numbered."""

        def of(x: Tensor) -> bool:
            entry, row = x.stride()[:2]
            if x.shape[0] <= 1 or entry == 0:
                return True
            whole = row > 0 and entry % row == 0
            return whole and (x.shape[0] - 1) * (entry // row) + x.shape[1] < 2**31

        return of(self.k) and of(self.v)

    @property
    def odd_rows(self) -> bool:
        """Whether a cache has odd rows. Decode reads such a cache as it is."""
        in_cache = self.cached or "paged" in self.extras
        if self.codes:
            return self.multiple < 16
        return in_cache and bool(self.k.shape[-1] % 8 or self.v.shape[-1] % 8)

    @property
    def multiple(self) -> int:
        """Bytes of which all rows of the cache are multiples; odd ones are read by up to 8."""
        tensors = (self.k, self.v)
        apart = [s for x in tensors for n, s in zip(x.shape[:-1], x.stride()) if n > 1]
        elements = math.gcd(*(x.shape[-1] for x in tensors), *apart)
        return (elements & -elements) * self.k.itemsize

    @property
    def counted(self) -> bool:
        """Whether kernels can count what there is."""
        counts = (self.batch, self.longest_q, self.capacity, *self.q.shape, *self.k.shape)
        return all(0 <= n < UNCOUNTED for n in counts)

    @property
    def needs_full_scores(self) -> bool:
        # Sinks join a row when it is finished, in plain kernels too; the library knows which plain
        # kernels keep largest logits.
        return bool(set(self.extras) - {"paged", "attn_probs", "sinks", "max_logits"})

    def __str__(self) -> str:
        q, k, v = self.q, self.k, self.v
        parts = [
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            f"{str(q.dtype).removeprefix('torch.')} on {self.gpu or q.device}",
        ]
        if self.causal:
            parts.append("causal")
        left, right = self.window_size
        if left >= 0 or right >= 0:
            parts.append(f"window ({left}, {right})")
        return ", ".join([*parts, *self.extras, *self.notes])

    def unserved(self, why: str, rejected: Iterable[tuple[str, str]] = ()) -> Explanation:
        return Explanation(
            self.operation, str(self), backend="none", why=why, rejected=tuple(rejected)
        )
