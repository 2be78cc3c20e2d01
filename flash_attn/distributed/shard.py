"""From whole sequences to a rank's tokens and back, and the positions that they have."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn.distributed.layout import Layout
from flash_attn.utils.distributed import all_gather_raw


def shard_sequence(x: Tensor, layout: Layout, rank: int, dim: int | None = None) -> Tensor:
    """The rank's tokens of a tensor that has all of them; differentiable.

    Arguments:
        x: anything with one entry per token along ``dim``: token ids (batch, seqlen), activations
            (batch, seqlen, …); for a packed layout (total, …).
        dim: 1, and 0 for a packed layout, if not given.
    """
    dim = _dim(layout, dim)
    if x.shape[dim] != layout.total:
        raise ValueError(
            f"x: got {x.shape[dim]} tokens in dimension {dim} (shape {tuple(x.shape)}); the "
            f"layout has {layout.total}"
        )
    starts = layout.cu_seqlens
    pieces = [x.narrow(dim, starts[s.sequence] + s.start, len(s)) for s in layout.segments(rank)]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0).clone()


@torch.no_grad()
def unshard_sequence(
    x: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, dim: int | None = None
) -> Tensor:
    """All tokens, on every rank, of a tensor whose tokens the ranks share; no gradient.

    Arguments:
        x: what :func:`shard_sequence` returns, or what was computed from it.
        group: all ranks of the layout, in its order; None is the default group.
    """
    dim = _dim(layout, dim)
    rows = gather_rows(x.movedim(dim, 0), [layout.tokens(r) for r in range(layout.ranks)], group)
    return rows[global_order(layout, x.device)].movedim(0, dim).contiguous()


def position_ids(layout: Layout, rank: int, device: torch.device | str | None = None) -> Tensor:
    """(tokens,) int64: the position of each of the rank's tokens in its own sequence.

    ``cos[position_ids]`` are the angles of rotary embeddings; positions do not know of ranks.
    """
    pieces = [torch.arange(s.start, s.stop) for s in layout.segments(rank)]
    return torch.cat([torch.arange(0), *pieces]).to(device)


def token_ids(layout: Layout, rank: int) -> Tensor:
    """(tokens,) int64: where each of the rank's tokens lies in the whole tensor."""
    starts = layout.cu_seqlens
    pieces = [
        torch.arange(starts[s.sequence] + s.start, starts[s.sequence] + s.stop)
        for s in layout.segments(rank)
    ]
    return torch.cat([torch.arange(0), *pieces])


def global_order(layout: Layout, device: torch.device) -> Tensor:
    """(total,) int64: where each token is once the ranks' tokens lie one after the other."""
    by_rank = torch.cat([token_ids(layout, rank) for rank in range(layout.ranks)])
    return by_rank.argsort().to(device)


def gather_rows(x: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """(rows, …) of each rank, ``counts`` of them, one after the other: (sum(counts), …).

    Fewer rows than the longest are padded for the journey: not every backend gathers uneven ones.
    """
    longest, rank = max(counts), dist.get_rank(group)
    if x.shape[0] != counts[rank]:
        raise ValueError(
            f"x: got {x.shape[0]} tokens; rank {rank} of the layout has {counts[rank]}"
        )
    padded = x.contiguous()
    if longest != counts[rank]:
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: counts[rank]] = x
    everything, _ = all_gather_raw(padded, group)
    if all(count == longest for count in counts):
        return everything
    parts = everything.split(longest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _dim(layout: Layout, dim: int | None) -> int:
    if dim is None:
        return 0 if layout.packed else 1
    return dim
