"""The dropout mask from the Philox paper and the position mapping alone, in numpy.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), section 4: Philox4x32 with
seven rounds.  Written apart from every backend: a mistake there and here would have to be the same.
"""

from __future__ import annotations

import numpy as np
import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK32 = np.uint64(0xFFFFFFFF)
SHIFT32 = np.uint64(32)


def philox4x32(counter, key: tuple[int, int], rounds: int = 7):
    """Four words of counter (broadcastable uint64 arrays below 2^32), two of key -> four words."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    for r in range(rounds):
        k0 = np.uint64((key[0] + r * WEYL[0]) & 0xFFFFFFFF)
        k1 = np.uint64((key[1] + r * WEYL[1]) & 0xFFFFFFFF)
        product0 = np.uint64(MULTIPLIERS[0]) * c0
        product1 = np.uint64(MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (
            (product1 >> SHIFT32) ^ c1 ^ k0,
            product1 & MASK32,
            (product0 >> SHIFT32) ^ c3 ^ k1,
            product0 & MASK32,
        )
    return c0, c1, c2, c3


def rate(dropout_p: float) -> float:
    """The share of entries that sixteen bits drop: what is kept is scaled by 1 / (1 - rate)."""
    return round(dropout_p * 65536) / 65536


def keep_mask(
    seed: int, offset: int, batch: int, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float
) -> torch.Tensor:
    """(b, h, sq, sk) bool, True where the entry is kept.

    One Philox call covers eight entries of a 16x16 block: rows i and i + 8, columns j, j + 1,
    j + 8 and j + 9 for an even j; the four words are those of (row half, column half), and each
    holds an even and an odd column in its two 16-bit halves.
    """
    low, high = (lambda x: x & 0xFFFFFFFF), (lambda x: (x >> 32) & 0xFFFFFFFF)
    i = np.arange(seqlen_q, dtype=np.uint64)[:, None]
    j = np.arange(seqlen_k, dtype=np.uint64)[None, :]
    one, three, four, seven, eight = (np.uint64(n) for n in (1, 3, 4, 7, 8))
    row_group = (i >> four) * eight + (i & seven)
    col_group = (j >> four) * four + ((j & seven) >> one)
    batch_head = np.arange(batch * heads, dtype=np.uint64)[:, None, None] & MASK32
    words = philox4x32(
        np.broadcast_arrays(row_group, col_group, batch_head, np.uint64(low(offset))),
        (low(seed), high(seed) ^ high(offset)),
    )
    word_index = ((i >> three) & one) + np.uint64(2) * ((j >> three) & one)  # (sq, sk)
    word = np.choose(np.broadcast_to(word_index, words[0].shape).astype(np.intp), words)
    half = (word >> (np.uint64(16) * (j & one))) & np.uint64(0xFFFF)
    threshold = round(rate(dropout_p) * 65536)
    kept = half >= np.uint64(threshold)
    return torch.from_numpy(kept.reshape(batch, heads, seqlen_q, seqlen_k))
