"""Linear attention on torch operations, on any device: chunk by chunk, sums in fp32.

With the decays of ``_inner`` (e^G from the chunk's start, e^(G_C - G) to its end), for a chunk of C
tokens with initial state S0 [K, V]:

    O  = (Q ∘ e^G) S0 + A V              S' = e^(G_C) ∘ S0 + (K ∘ e^(G_C - G))ᵀ V
    dQ = e^G ∘ (dO S0ᵀ) + intra          dK = e^(G_C - G) ∘ (V dS'ᵀ) + intra
    dV = Aᵀ dO + (K ∘ e^(G_C - G)) dS'   dS0 = e^(G_C) ∘ dS' + (Q ∘ e^G)ᵀ dO

A gate's gradient is a sum over all that crosses its token: pairs of a later query and an earlier
key, queries that read S0, keys that reach S', and S0 itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.linear import _inner
from flash_attn.linear._table import Segment, Table, table_of

__all__ = ["Gradients", "Scan", "backward", "forward", "from_the_end"]

# Tokens of a chunk. A vector of gates takes C exponentials of K numbers a token, so few of them.
_CHUNK_SCALAR = 64
_CHUNK_VECTOR = 16
# Numbers in the largest tensors of the chunks that are computed at a time: so many that a CPU's
# caches hold them; on a GPU so many that they take longer than their launches.
_NUMBERS_ON_A_CPU, _NUMBERS = 1 << 20, 1 << 25


class Scan(NamedTuple):
    """The arguments of a call; shapes as in ``_kernels``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    initial_state: Tensor | None  # [N, H, K, V]
    cu_seqlens: Tensor | None
    scale: float

    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.q.dtype, torch.float32)

    def by_token(self) -> Tensor:
        """Gates [B * T, H, X]."""
        batch, seqlen, heads = self.v.shape[:3]
        g = self.g
        if g is None:
            g = self.q.new_zeros(heads)
        if g.dim() == 1:
            g = g.expand(batch, seqlen, heads)
        return (g if g.dim() == 4 else g[..., None]).flatten(0, 1)

    def table(self) -> Table:
        is_vector = self.g is not None and self.g.dim() == 4
        return table_of(self.v, self.cu_seqlens, _CHUNK_VECTOR if is_vector else _CHUNK_SCALAR)

    def chunks_at_a_time(self, table: Table) -> int:
        heads, columns = self.v.shape[2:]
        channels = self.k.shape[-1]
        gates = channels if self.g is not None and self.g.dim() == 4 else 1
        numbers = heads * max(channels * columns, table.chunk_size**2 * gates)
        most = _NUMBERS_ON_A_CPU if self.v.device.type == "cpu" else _NUMBERS
        return max(1, most // max(1, numbers))

    def first_state(self, table: Table) -> Tensor:
        """[N, H, K, V], of our own."""
        if self.initial_state is not None:
            return self.initial_state.to(self.dtype(), copy=True)
        shape = (len(table.lengths), self.v.shape[2], self.k.shape[-1], self.v.shape[-1])
        return self.v.new_zeros(shape, dtype=self.dtype())


class _Chunk(NamedTuple):
    """The chunks of a segment."""

    q: Tensor  # [chunks, H, C, K], scaled
    k: Tensor
    v: Tensor  # [chunks, H, C, V]
    decays: _inner.Decays

    @classmethod
    def of(cls, scan: Scan, segment: Segment) -> _Chunk:
        def gathered(x: Tensor) -> Tensor:
            return segment.gather(x, scan.dtype())

        shared = scan.v.shape[2] // scan.k.shape[2] if scan.k.shape[2] else 1
        q, k = (
            gathered(x.flatten(0, 1)).repeat_interleave(shared, dim=1) for x in (scan.q, scan.k)
        )
        g = gathered(scan.by_token())
        return cls(q * scan.scale, k, gathered(scan.v.flatten(0, 1)), _inner.decays(g))

    def reading_q(self) -> Tensor:
        """What reads the initial state."""
        return self.q * self.decays.from_start

    def reaching_k(self) -> Tensor:
        """What reaches the final state."""
        return self.k * self.decays.to_end

    def states(self, columns: list[Tensor], state: Tensor) -> Tensor:
        """The initial state of each chunk; ``state`` [N, H, K, V] becomes the final one."""
        return _along(columns, state, self.decays.total.mT, self.reaching_k().mT @ self.v)


def _along(columns: list[Tensor], state: Tensor, decay: Tensor, added: Tensor) -> Tensor:
    """state <- decay * state + added, column by column; [chunks, H, K, V] the states before."""
    before = torch.empty_like(added)
    at = 0
    for sequences in columns:
        here = slice(at, at + len(sequences))
        if len(sequences) == len(state):  # all, in order: fewer launches
            before[here] = state
            torch.addcmul(added[here], decay[here], state, out=state)
        else:
            before[here] = state[sequences]
            state[sequences] = torch.addcmul(added[here], decay[here], before[here])
        at = here.stop
    return before


def forward(scan: Scan) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] in q's dtype and the final state [N, H, K, V]."""
    table = scan.table()
    state = scan.first_state(table)
    o = torch.zeros_like(scan.v, memory_format=torch.contiguous_format)
    for segment in table.segments(scan.chunks_at_a_time(table)):
        chunk = _Chunk.of(scan, segment)
        states = chunk.states(segment.columns, state)
        A = _inner.intra(chunk.q, chunk.k, chunk.decays.between)
        segment.scatter(o.flatten(0, 1), A @ chunk.v + chunk.reading_q() @ states)
    return o, state


class Gradients(NamedTuple):
    """Those of q and k for each head of v; dg is None, or [B, T, H, X]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor | None
    dinitial_state: Tensor | None  # None where it is not wanted


def from_the_end(
    scan: Scan, table: Table, state: Tensor, walk: Callable[[Segment, Tensor], None]
) -> Iterator[tuple[Segment, Tensor]]:
    """Segments, the last one first, each with the states before it.

    walk: takes states, first those before the first segment, through a segment, in place.
    """
    segments = list(table.segments(scan.chunks_at_a_time(table)))
    borders = []
    for segment in segments[:-1]:
        borders.append(state.clone())
        walk(segment, state)
    borders.append(state)
    while segments:
        yield segments.pop(), borders.pop()


def backward(scan: Scan, do: Tensor, dfinal_state: Tensor | None, with_dg: bool) -> Gradients:
    """All gradients: dq and dk fp32 [B, T, H, K], dv as v, dg fp32 [B, T, H, X], the state's."""
    table = scan.table()
    state = scan.first_state(table)
    dstate = torch.zeros_like(state) if dfinal_state is None else dfinal_state.to(state.dtype)
    dstate = dstate.clone() if dstate is dfinal_state else dstate
    dq, dk, dv, dg = _empty_gradients(scan, with_dg)

    def walk(segment: Segment, state: Tensor) -> None:
        _Chunk.of(scan, segment).states(segment.columns, state)

    for segment, border in from_the_end(scan, table, state, walk):
        results = _segment_backward(scan, segment, border, dstate, do, with_dg)
        for out, x in zip((dq, dk, dv, dg), results):
            if out is not None and x is not None:
                segment.scatter(out.flatten(0, 1), x)
    return Gradients(dq, dk, dv, dg, dstate)


def _empty_gradients(scan: Scan, with_dg: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Zeros: what no sequence holds keeps them."""
    batch, seqlen, heads, _ = scan.v.shape
    dq, dk = (
        x.new_zeros((batch, seqlen, heads, x.shape[-1]), dtype=scan.dtype())
        for x in (scan.q, scan.k)
    )
    dv = torch.zeros_like(scan.v, memory_format=torch.contiguous_format)
    if not with_dg:
        return dq, dk, dv, None
    gates = scan.by_token().shape[-1]
    return dq, dk, dv, dq.new_zeros((batch, seqlen, heads, gates))


def _segment_backward(
    scan: Scan, segment: Segment, state: Tensor, dstate: Tensor, do_: Tensor, with_dg: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dg of a segment that begins with ``state``; ``dstate`` [N, H, K, V], the
    gradient of its final state, becomes that of ``state``."""
    chunk = _Chunk.of(scan, segment)
    q, k, v, decays = chunk
    do = segment.gather(do_.flatten(0, 1), scan.dtype())
    S = chunk.states(segment.columns, state)
    # Columns and what belongs to them from the last one to the first.
    order = torch.arange(len(S), device=S.device).split([len(c) for c in segment.columns])
    reverse = torch.cat(order[::-1])
    dS = torch.empty_like(S)
    added = (chunk.reading_q().mT @ do)[reverse]
    dS[reverse] = _along(segment.columns[::-1], dstate, decays.total.mT[reverse], added)
    A = _inner.intra(q, k, decays.between)
    dv = A.mT @ do + chunk.reaching_k() @ dS
    dq, dk, dg = _inner.intra_backward(q, k, decays.between, do @ v.mT, with_dg)
    dq_state, dk_state = decays.from_start * (do @ S.mT), decays.to_end * (v @ dS.mT)
    if dg is not None:
        read, reached = _to_gates(q * dq_state, dg), _to_gates(k * dk_state, dg)
        kept = _to_gates((S * dS).sum(-1)[..., None, :], dg) * decays.total
        dg = dg + _inner.sum_from(read) + _inner.sum_before(reached) + kept
    return (dq + dq_state) * scan.scale, dk + dk_state, dv, dg


def _to_gates(x: Tensor, like: Tensor) -> Tensor:
    """[.., K] -> [.., X]."""
    return x if x.shape[-1] == like.shape[-1] and like.shape[-1] != 1 else x.sum(-1, keepdim=True)
