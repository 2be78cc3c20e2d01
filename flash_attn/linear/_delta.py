"""The gated delta rule on torch operations, on any device: chunk by chunk, sums in fp32.

The state forgets what it holds for a key before it takes the new value (Yang et al. 2025):

    S_t = e^(g_t) S_(t-1) + k_t β_t (v_t - e^(g_t) S_(t-1)ᵀ k_t)ᵀ,   o_t = scale S_tᵀ q_t

In a chunk with initial state S0 and the decays D of ``_inner``, the values that are added are

    V' = L⁻¹ (β ∘ (V - (K ∘ e^G) S0)),   L = I + tril₋₁((β ∘ K) Kᵀ ∘ D)

and with V' in V's place everything is as in ``_chunks``. In the backward dR = L⁻ᵀ dV' is the
gradient of what L is applied to, and dL = -dR V'ᵀ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.linear import _inner
from flash_attn.linear._chunks import Scan, from_the_end
from flash_attn.linear._table import Segment, lower

__all__ = ["Delta", "backward", "forward"]


class Delta(NamedTuple):
    """The arguments of a call: those of a scan with scalar decays, and beta [B, T, H]."""

    scan: Scan
    beta: Tensor


class _Chunk(NamedTuple):
    """The chunks of a segment, without what depends on states."""

    q: Tensor  # [chunks, H, C, K], scaled
    k: Tensor
    v: Tensor  # [chunks, H, C, V]
    beta: Tensor  # [chunks, H, C, 1]
    decays: _inner.Decays
    L: Tensor  # [chunks, H, C, C]
    A: Tensor  # [chunks, H, C, C]

    @classmethod
    def of(cls, call: Delta, segment: Segment) -> _Chunk:
        scan, shared = call.scan, call.scan.v.shape[2] // max(1, call.scan.k.shape[2])

        def gathered(x: Tensor, repeats: int = 1) -> Tensor:
            x = segment.gather(x.flatten(0, 1), scan.dtype())
            return x.repeat_interleave(repeats, dim=1)

        q, k = gathered(scan.q, shared) * scan.scale, gathered(scan.k, shared)
        beta = gathered(call.beta[..., None])
        decays = _inner.decays(segment.gather(scan.by_token(), scan.dtype()))
        between = decays.between.squeeze(-1)
        size = k.shape[-2]
        strict = ((beta * k) @ k.mT * between).masked_fill(~lower(size, -1, k.device), 0)
        L = strict + torch.eye(size, dtype=k.dtype, device=k.device)
        A = (q @ k.mT) * between
        return cls(q, k, gathered(scan.v), beta, decays, L, A)

    def reading_q(self) -> Tensor:
        return self.q * self.decays.from_start

    def reading_k(self) -> Tensor:
        return self.k * self.decays.from_start

    def reaching_k(self) -> Tensor:
        return self.k * self.decays.to_end

    def along(self, columns: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """The states before each chunk and V' of each; ``state`` becomes the final one."""
        both = torch.cat((self.beta * self.v, self.beta * self.reading_k()), -1)
        both = torch.linalg.solve_triangular(self.L, both, upper=False, unitriangular=True)
        U, W = both.split((self.v.shape[-1], self.k.shape[-1]), -1)
        before = state.new_empty(len(self.k), *state.shape[1:])
        added, reaching, at = torch.empty_like(U), self.reaching_k().mT, 0
        for sequences in columns:
            here = slice(at, at + len(sequences))
            before[here] = state[sequences]
            added[here] = U[here] - W[here] @ before[here]
            state[sequences] = self.decays.total[here] * before[here] + reaching[here] @ added[here]
            at = here.stop
        return before, added

    def along_backward(
        self, columns: list[Tensor], dstate: Tensor, do: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of each chunk's final state, and dR; ``dstate`` becomes the first one's."""
        both = torch.cat((self.A.mT @ do, self.reaching_k()), -1)
        both = torch.linalg.solve_triangular(self.L.mT, both, upper=True, unitriangular=True)
        P, Y = both.split((self.v.shape[-1], self.k.shape[-1]), -1)
        dS = dstate.new_empty(len(self.k), *dstate.shape[1:])
        dR, read = torch.empty_like(P), self.reading_q().mT @ do
        reading, at = (self.beta * self.reading_k()).mT, len(self.k)
        for sequences in reversed(columns):
            here = slice(at - len(sequences), at)
            dS[here] = dstate[sequences]
            dR[here] = P[here] + Y[here] @ dS[here]
            dstate[sequences] = (
                self.decays.total[here] * dS[here] + read[here] - reading[here] @ dR[here]
            )
            at = here.start
        return dS, dR


def forward(call: Delta) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] in q's dtype and the final state [N, H, K, V]."""
    scan = call.scan
    table = scan.table()
    state = scan.first_state(table)
    o = torch.zeros_like(scan.v, memory_format=torch.contiguous_format)
    for segment in table.segments(scan.chunks_at_a_time(table)):
        chunk = _Chunk.of(call, segment)
        states, added = chunk.along(segment.columns, state)
        segment.scatter(o.flatten(0, 1), chunk.A @ added + chunk.reading_q() @ states)
    return o, state


class Gradients(NamedTuple):
    """Those of q and k for each head of v; dg and dbeta [B, T, H]; fp32 but for dv."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dinitial_state: Tensor


def backward(call: Delta, do: Tensor, dfinal_state: Tensor | None) -> Gradients:
    """All gradients."""
    scan = call.scan
    table = scan.table()
    state = scan.first_state(table)
    dstate = torch.zeros_like(state)
    if dfinal_state is not None:
        dstate.copy_(dfinal_state)
    batch, seqlen, heads, columns = scan.v.shape
    channels = scan.k.shape[-1]
    results = [
        scan.v.new_zeros((batch, seqlen, heads, size), dtype=scan.dtype())
        for size in (channels, channels, columns, 1, 1)
    ]

    def walk(segment: Segment, state: Tensor) -> None:
        _Chunk.of(call, segment).along(segment.columns, state)

    for segment, border in from_the_end(scan, table, state, walk):
        found = _segment_backward(call, segment, border, dstate, do)
        for out, x in zip(results, found):
            segment.scatter(out.flatten(0, 1), x)
    dq, dk, dv, dg, dbeta = results
    return Gradients(dq, dk, dv.to(scan.v.dtype), dg.squeeze(-1), dbeta.squeeze(-1), dstate)


def _segment_backward(
    call: Delta, segment: Segment, state: Tensor, dstate: Tensor, do_: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg and dbeta of a segment that begins with ``state``; ``dstate``, the gradient of
    its final state, becomes that of ``state``."""
    chunk = _Chunk.of(call, segment)
    q, k, v, beta, decays, L, A = chunk
    do = segment.gather(do_.flatten(0, 1), call.scan.dtype())
    S, added = chunk.along(segment.columns, state)
    dS, dR = chunk.along_backward(segment.columns, dstate, do)
    dv = beta * dR
    between = decays.between.squeeze(-1)
    dA, dL = do @ added.mT, -(dR @ added.mT)
    strict = L.tril(-1)
    dscores = dA * between
    # What is inside of β in L, without and with its decay.
    of_keys = dL.masked_fill(~lower(dL.shape[-1], -1, dL.device), 0) * between
    scores = k @ k.mT
    dbeta = (dR * (v - chunk.reading_k() @ S)).sum(-1, keepdim=True)
    dbeta = dbeta + (of_keys * scores).sum(-1, keepdim=True)
    of_scores = beta * of_keys
    dq_state = decays.from_start * (do @ S.mT)
    dk_read = decays.from_start * -(dv @ S.mT)
    dk_reached = decays.to_end * (added @ dS.mT)
    dq = dscores @ k + dq_state
    dk = dscores.mT @ q + (of_scores + of_scores.mT) @ k + dk_read + dk_reached
    pairs = dA * A + dL * strict
    read = (q * dq_state + k * dk_read).sum(-1, keepdim=True)
    reached = (k * dk_reached).sum(-1, keepdim=True)
    kept = decays.total * (S * dS).sum((-1, -2))[..., None, None]
    dg = _inner.crossing(pairs[..., None])
    dg = dg + _inner.sum_from(read) + _inner.sum_before(reached) + kept
    return dq * call.scan.scale, dk, dv, dg, dbeta
