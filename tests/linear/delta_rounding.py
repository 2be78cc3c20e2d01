"""What rounding to 16 bits may do to results of the delta rule's kernels over chunks.

With u half a last digit of q's dtype, and u_S that of bf16, a chunk with the state S0 rounds T and
A (DeltaFactors) by u, S0 by u_S, R = V - (K∘e^G) S0 by u, U = T R by u, and no number else. What
an error of R, of U or of S0 does to o and to the next state is a product with matrices that the
chunk has. Errors are independent, so their squares add up; each result is held to z times the root:

    |o - exact| <= u |o| + z √(Σ (what an error's number is multiplied by in o)² error²)

The errors of a state's numbers depend on each other: where keys are alike, all have its direction.
So what goes on from chunk to chunk is the covariance of those of a column. fp32 adds 2^-16 of the
terms at most: sums, and T, whose factors have 16 bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_attn.linear import chunk_gated_delta_rule
from tests.linear.compare import HALF_DIGIT, hold
from tests.linear.reference import delta_rule

_OF_STATES = 2.0**-8
_SUMS = 2.0**-16
_SMALLEST = {torch.bfloat16: 1e-30, torch.float16: 2.0**-24}  # where digits end
_Z = 3.0
_CHUNK = 64


@dataclass(frozen=True)
class Case:
    K: int = 16
    V: int = 16
    T: int = 65
    gate: float | None = None  # of every fifth token
    B: int = 1
    H: int = 1
    HV: int = 2
    cu_seqlens: tuple[int, ...] | None = None
    with_state: bool = True
    v_first: bool = False
    dtype: torch.dtype = torch.bfloat16
    most_beta: float = 1.0
    alike: float = 0.0  # how much keys have in common
    normalizes: bool = False  # keys are of any norm, and the function divides q and k by theirs

    def inputs(self) -> dict[str, Tensor | None]:
        """float64, exact in the case's dtype; keys of norm 1: with longer ones the state grows."""

        def drawn(*shape: int) -> Tensor:
            return torch.randn(self.B, self.T, *shape)

        sequences = self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        g = -0.1 * torch.rand(self.B, self.T, self.HV)
        if self.gate is not None:
            g.view(-1)[::5] = self.gate
        keys = drawn(self.H, self.K) + self.alike * torch.randn(self.K)
        keys = 3 * keys if self.normalizes else F.normalize(keys, dim=-1)
        exact = {
            "q": drawn(self.H, self.K).to(self.dtype),
            "k": keys.to(self.dtype),
            "v": drawn(self.HV, self.V).to(self.dtype),
            "g": g,
            "beta": self.most_beta * torch.rand(self.B, self.T, self.HV),
            "initial_state": torch.randn(sequences, self.HV, self.K, self.V),
        }
        exact = {name: x.double() for name, x in exact.items()}
        return exact if self.with_state else exact | {"initial_state": None}


def check(case: Case, device: str = "cpu", exact: dict[str, Tensor | None] | None = None) -> None:
    """o and the final state of a case."""
    exact = case.inputs() if exact is None else exact
    edges = None if case.cu_seqlens is None else list(case.cu_seqlens)
    given = {}
    for name, x in exact.items():
        if x is None:
            continue
        x = x.mT if case.v_first and name == "initial_state" else x
        given[name] = x.to(device, case.dtype if name in "qkv" else torch.float32, copy=True)
    seqlens = None if edges is None else torch.tensor(edges, dtype=torch.int32, device=device)
    o, state = chunk_gated_delta_rule(
        **given, cu_seqlens=seqlens, output_final_state=True, state_v_first=case.v_first,
        use_qk_l2norm_in_kernel=case.normalizes,
    )  # fmt: skip
    if case.normalizes:
        exact = exact | {
            n: exact[n] / (exact[n].square().sum(-1, keepdim=True) + 1e-6).sqrt() for n in "qk"
        }
    state = state.mT if case.v_first else state
    rest = [exact[name] for name in ("q", "k", "v", "g", "beta")]
    want = delta_rule(*rest, case.K**-0.5, exact["initial_state"], edges)
    of_o, of_state = errors(case, exact)
    u, smallest = HALF_DIGIT[case.dtype], _SMALLEST[case.dtype] * (1 + case.T)
    hold(f"{case}: o", o, want[0], u * want[0].abs() + of_o + smallest)
    hold(f"{case}: final state", state, want[1], of_state + smallest)


def errors(case: Case, x: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """What is allowed of o [B, T, HV, V], without its last rounding, and of the final states."""
    of_o = torch.zeros_like(x["v"])
    edges = case.cu_seqlens
    spans = [(b, 0, case.T) for b in range(case.B)]
    if edges is not None:
        spans = [(0, begin, end) for begin, end in itertools.pairwise(edges)]
    of_state = torch.zeros(len(spans), case.HV, case.K, case.V).double()
    for n, (b, begin, end) in enumerate(spans):
        for head in range(case.HV):
            shared = head * case.H // case.HV
            S = torch.zeros(case.K, case.V).double()
            if x["initial_state"] is not None:
                S = x["initial_state"][n, head]
            covariance = torch.zeros(case.V, case.K, case.K).double()
            walk = _Walk(case, S, covariance, torch.zeros_like(S))
            for first in range(begin, end, _CHUNK):
                rows = slice(first, min(first + _CHUNK, end))
                of_chunk = walk.chunk(
                    x["q"][b, rows, shared], x["k"][b, rows, shared], x["v"][b, rows, head],
                    x["g"][b, rows, head], x["beta"][b, rows, head, None],
                )  # fmt: skip
                of_o[b, rows, head] = of_chunk
            squares = walk.covariance.diagonal(dim1=1, dim2=2).mT
            of_state[n, head] = _Z * squares.clamp(min=0).sqrt() + walk.lost
    return of_o, of_state


@dataclass
class _Walk:
    """A state, the covariance of its errors, and what fp32 may lose."""

    case: Case
    S: Tensor  # [K, V]
    covariance: Tensor  # [V, K, K]
    lost: Tensor  # [K, V]

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """The error that o [C, V] may have; the state becomes the one after the chunk."""
        u, scale, S = HALF_DIGIT[self.case.dtype], self.case.K**-0.5, self.S
        between = torch.eye(len(g)).double()  # decays from a column's token to a row's
        for t in range(1, len(g)):
            between[t, :t] = between[t - 1, :t] * g[t].exp()
        before, left = g.cumsum(0).exp()[:, None], between[-1][:, None]
        A = scale * (q @ k.mT) * between
        own = (beta * (k @ k.mT) * between).tril(-1)
        T = torch.linalg.inv(own + torch.eye(len(g)).double()) * beta.mT
        R = v - before * (k @ S)
        U = T @ R
        of_R, of_S = (u * R).square(), (_OF_STATES * S).square()
        of_U = T.square() @ of_R  # T's own rounding
        used = of_U + (u * U).square()
        reach = (k * left).mT
        # What o and S' have of S0, and S' by way of R, where S0 is rounded.
        reads = scale * before * q - (A @ T * before.mT) @ k
        through = (reach @ T * before.mT) @ k
        keeps = before[-1] * torch.eye(len(S)).double() - through
        of_o = reads.square() @ of_S + (A @ T).square() @ of_R
        of_o = of_o + A.square() @ (used + (u * U).square())
        of_o = of_o + torch.einsum("tk,vkl,tl->tv", reads, self.covariance, reads)
        terms = v.abs() + before * (k.abs() @ S.abs())
        lost = A.abs() @ (T.abs() @ terms) + scale * before * (q.abs() @ S.abs())
        allowed = _Z * of_o.clamp(min=0).sqrt() + _SUMS * lost + reads.abs() @ self.lost
        self.covariance = keeps @ self.covariance @ keeps.mT
        for matrix, squares in ((through, of_S), (reach, used), (reach @ T, of_R)):
            self.covariance += (matrix * squares.mT[:, None]) @ matrix.mT
        terms = before[-1] * S.abs() + reach.abs() @ (T.abs() @ terms)
        self.lost = keeps.abs() @ self.lost + _SUMS * terms
        self.S = before[-1] * S + reach @ U
        return allowed
