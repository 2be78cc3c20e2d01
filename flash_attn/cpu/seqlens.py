"""Where each packed sequence lies, with the checks of what cu_seqlens and its like contain."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flash_attn.api import leading_zero
from flash_attn.call import Keys, Lengths


@dataclass(frozen=True)
class Sequence:
    index: int  # in the batch
    rows: slice  # of the packed queries
    keys: slice  # of the packed keys; with pages: of the sequence's own positions

    @property
    def seqlen_q(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def seqlen_k(self) -> int:
        return self.keys.stop - self.keys.start


def sequences(
    total_q: int,
    total_k: int | None,
    lengths: Lengths,
    keys: Keys,
    page_capacity: int | None = None,
) -> list[Sequence]:
    """Sequences of a varlen call, in order.

    total_k is None for paged keys, of which a sequence can hold page_capacity; cu_seqlens_k then
    gives lengths only, and not even these with seqused_k.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    leftpad_k, seqused_k = keys.leftpad_k, keys.seqused_k
    cu_q = checked_offsets("cu_seqlens_q", cu_seqlens_q, total_q, max_seqlen_q, "max_seqlen_q")
    batch = len(cu_q) - 1
    leftpad = [0] * batch if leftpad_k is None else leftpad_k.tolist()
    if page_capacity is None or seqused_k is None:
        # With seqused_k, cu_seqlens_k delimits slots that may be longer than what is used of them.
        claim = max_seqlen_k if seqused_k is None and leftpad_k is None else None
        cu_k = checked_offsets("cu_seqlens_k", cu_seqlens_k, total_k, claim, "max_seqlen_k")
    else:
        cu_k = [0] * (batch + 1)
    leading_zero.warn("cu_seqlens_q", cu_seqlens_q, cu_q[0], cu_q[-1], total_q)
    if total_k is not None:
        leading_zero.warn("cu_seqlens_k", cu_seqlens_k, cu_k[0], cu_k[-1], total_k)
    used = (
        [cu_k[i + 1] - cu_k[i] for i in range(batch)] if seqused_k is None else seqused_k.tolist()
    )
    result = []
    for i in range(batch):
        slot = cu_k[i + 1] - cu_k[i] if page_capacity is None else page_capacity
        _check_used(i, used[i], slot, "seqused_k" if seqused_k is not None else "cu_seqlens_k")
        if leftpad[i] < 0:
            raise ValueError(f"leftpad_k[{i}]: got {leftpad[i]}; 0 or more is needed")
        if leftpad[i] > max(0, used[i]):
            raise ValueError(
                f"leftpad_k[{i}]: got {leftpad[i]}; at most {used[i]} is needed, the keys of "
                f"sequence {i} with padding"
            )
        start = (cu_k[i] if page_capacity is None else 0) + leftpad[i]
        length = max(0, used[i] - leftpad[i])
        if length > int(max_seqlen_k):
            raise ValueError(
                f"max_seqlen_k: got {int(max_seqlen_k)}; the longest sequence or more is needed, "
                f"and sequence {i} has {length} keys"
            )
        result.append(Sequence(i, slice(cu_q[i], cu_q[i + 1]), slice(start, start + length)))
    return result


def rows_in_use(seqs: list[Sequence]) -> slice:
    """The rows of the packed queries from the first sequence to the last."""
    return slice(seqs[0].rows.start, seqs[-1].rows.stop) if seqs else slice(0, 0)


def _check_used(index: int, used: int, slot: int, name: str) -> None:
    if used > slot:
        raise ValueError(f"{name}: got {used} keys for sequence {index}; at most {slot} are needed")


def checked_offsets(
    name: str, cu_seqlens: Tensor, total: int | None, max_seqlen: int | None, max_name: str
) -> list[int]:
    """cu_seqlens as a list that is never negative, never decreases, and stays within total.

    It may start later than at 0: a slice of it is a slice of the batch.
    """
    offsets = cu_seqlens.tolist()
    if not offsets:
        raise ValueError(f"{name}: got no entries; batch + 1 are needed")
    if offsets[0] < 0:
        raise ValueError(f"{name}[0]: got {offsets[0]}; 0 or more is needed")
    longest = 0
    for i in range(len(offsets) - 1):
        length = offsets[i + 1] - offsets[i]
        if length < 0:
            raise ValueError(
                f"{name}[{i + 1}]: got {offsets[i + 1]} after {offsets[i]}; cumulative lengths "
                "that never decrease are needed"
            )
        longest = max(longest, length)
    if total is not None and offsets[-1] > total:
        raise ValueError(
            f"{name}[-1]: got {offsets[-1]}; at most {total} is needed, the rows given"
        )
    if max_seqlen is not None and longest > int(max_seqlen):
        raise ValueError(
            f"{max_name}: got {int(max_seqlen)}; the longest sequence or more is needed, and "
            f"{name} has one of {longest}"
        )
    return offsets
