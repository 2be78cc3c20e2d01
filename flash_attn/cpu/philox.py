"""Dropout bits: Philox4x32 with 7 rounds.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.

Whether an entry is kept is a pure function of (seed, offset, batch, head, row, column), so that
every backend and every tile size drops the same entries. One Philox call covers eight entries of a
16 x 16 block of the score matrix, the eight that one thread of a 16-row tensor-core tile owns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 7
_MUL = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_TOP_BITS = 0x80008000 - (1 << 32)  # of both 16-bit halves, as an int32
BLOCK = 16  # both sides of the block that the counters are laid out in


def philox4x32(
    counter: Sequence[Tensor], key: Sequence[Tensor | int], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words (int64 tensors) for a counter of four and a key of two 32-bit words.

    Counter words are int64 tensors of shapes that broadcast; they are expanded only where the
    rounds mix them, so a grid given as a row and a column vector costs two rounds next to nothing.
    """
    return tuple(word & _MASK32 for word in _rounds(counter, key, rounds))


def _rounds(counter, key, rounds: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As philox4x32, with garbage above the 32 bits of the second and the fourth word."""
    c0, c1, c2, c3 = counter
    k0, k1 = (word & _MASK32 for word in key)
    for _ in range(rounds):
        # int64 wraps modulo 2**64; the mask removes the sign bits of the arithmetic shift.  The low
        # words stay whole products: they are only ever xor-ed into what is masked here.
        product0, product1 = c0 * _MUL[0], c2 * _MUL[1]
        c0 = (product1 >> 32) ^ c1
        c2 = (product0 >> 32) ^ c3
        c0.bitwise_xor_(k0).bitwise_and_(_MASK32)
        c2.bitwise_xor_(k1).bitwise_and_(_MASK32)
        c1, c3 = product1, product0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def keep_threshold(p: float) -> int:
    """An entry is kept when its 16 random bits are at least this."""
    return min(65535, round(p * 65536))


def kept_share(p: float) -> float:
    """How many of all entries are kept, exactly: 1 - p but for the rounding of the threshold."""
    return 1 - keep_threshold(p) / 65536


def keep_blocks(
    seed: int, offset: int, head_ids: Tensor, row_blocks: Tensor, col_blocks: Tensor, p: float
) -> Tensor:
    """Keep mask of whole 16 x 16 blocks.

    head_ids: int64 of any shape (*lead), batch * heads_q + head.  row_blocks (..., nr), col_blocks
    (..., nc): int64 block indices, row >> 4 and column >> 4, whose leading dimensions broadcast to
    lead.  Returns bool (*lead, nr * 16, nc * 16).
    """
    row_group = (row_blocks.unsqueeze(-1) * 8 + torch.arange(8)).flatten(-2)  # (..., nr * 8)
    col_group = (col_blocks.unsqueeze(-1) * 4 + torch.arange(4)).flatten(-2)  # (..., nc * 4)
    lead = head_ids.shape
    counter = (
        row_group.unsqueeze(-1) & _MASK32,
        col_group.unsqueeze(-2) & _MASK32,
        head_ids.reshape(*lead, 1, 1) & _MASK32,
        torch.tensor(offset & _MASK32),
    )
    words = _rounds(counter, (seed, (seed >> 32) ^ (offset >> 32)), ROUNDS)
    nr, nc = row_blocks.shape[-1], col_blocks.shape[-1]
    # Halves of a word are neighbours in memory, as their columns are.  They are compared as signed
    # 16-bit numbers, with the top bit flipped on both sides.
    threshold = keep_threshold(p) - 32768
    # row = (block, bit 3, low 3 bits), column = (block, bit 3, low 3 bits)
    keep = torch.empty((*lead, nr, 2, 8, nc, 2, 8), dtype=torch.bool)
    for index, word in enumerate(words):
        halves = word.to(torch.int32).bitwise_xor_(_TOP_BITS).view(torch.int16)
        halves = halves.view(*lead, nr, 8, nc, 8)
        torch.ge(halves, threshold, out=keep[..., index & 1, :, :, index >> 1, :])
    return keep.view(*lead, nr * BLOCK, nc * BLOCK)
