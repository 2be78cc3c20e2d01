"""Calls of ``chunk_scan``, their inputs, and both their results beside the reference's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.linear import _kernels, chunk_scan
from tests.linear.compare import KERNEL_SUMS, SUMS, assert_close
from tests.linear.reference import recurrence

HEAD_DIMS = (1, 7, 8, 16, 60, 100, 128, 320)
SEQLENS = (0, 1, 15, 63, 65, 200)
GATES = (0.0, -1e-3, -5.0, -50.0, -torch.inf)


class Backend(NamedTuple):
    """What computes, and how exactly."""

    device: str
    dtype: torch.dtype = torch.float32  # of the brute force
    has_own_bits: bool = True  # whatever else is in the batch, which torch's GPU products look at
    sums: float = SUMS  # error that is allowed, of the sum of all terms' magnitudes
    kernels: bool = False  # whether calls may run compiled kernels


DECAYS = ("none", "head", "scalar", "vector")


@dataclass(frozen=True)
class Case:
    """One call."""

    decay: str
    K: int = 16
    V: int = 16
    T: int = 65
    gate: float | None = None  # of every third token, beside small ones; None: uniform in (-1, 0)
    B: int = 1
    H: int = 2
    HK: int = 2
    cu_seqlens: tuple[int, ...] | None = None
    with_state: bool = True
    v_first: bool = False
    dtype: torch.dtype = torch.float32

    def gates(self) -> Tensor | None:
        """float64, exact in fp32."""
        if self.decay == "none":
            return None
        shape = {
            "head": (self.H,),
            "scalar": (self.B, self.T, self.H),
            "vector": (self.B, self.T, self.H, self.K),
        }[self.decay]
        g = -torch.rand(shape)
        if self.gate is not None:
            flat = g.mul_(0.01).view(-1)
            flat[:: 3 if self.decay != "head" else 2] = self.gate
        return g.double()

    def inputs(self) -> dict[str, Tensor | None]:
        """float64, exact in the case's dtype."""

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape).to(self.dtype).double()

        B, T, H, HK, K, V = self.B, self.T, self.H, self.HK, self.K, self.V
        sequences = B if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        state = torch.randn(sequences, H, K, V).double() if self.with_state else None
        return {
            "q": drawn(B, T, HK, K),
            "k": drawn(B, T, HK, K),
            "v": drawn(B, T, H, V),
            "g": self.gates(),
            "initial_state": state,
        }

    def given(self, device: str) -> dict[str, Tensor]:
        """fp32 inputs on a device, without those that the case has not."""
        exact = self.inputs().items()
        return {name: x.to(device, torch.float32) for name, x in exact if x is not None}


def packed(T: int) -> tuple[int, ...]:
    """Sequences that fill T tokens, some of them empty."""
    return (0, 0, T // 3, T // 3, T - T // 5, T, T)


def by_turns(n: int, decay: str, K: int, T: int) -> Case:
    """Case n of many in 16 bits: V, gates, packing, states and dtypes take turns."""
    V = HEAD_DIMS[(3 * n + n // 8) % 8]
    return Case(
        decay, K, 24 if K * V * T > 1 << 21 else V, T, GATES[n % 5], H=1 + n % 2, HK=1,
        cu_seqlens=packed(T) if n % 3 == 1 else None, with_state=n % 7 > 1, v_first=n % 2 == 1,
        dtype=(torch.bfloat16, torch.float16)[n % 2],
    )  # fmt: skip


def brute_force(decay: str, K: int, dtype: torch.dtype) -> Iterator[Case]:
    """Every pair of head dims at every length, of large states at one; the length of those, gates,
    packing and states take turns."""
    first = DECAYS.index(decay) + 3 * HEAD_DIMS.index(K)
    for n, (V, T) in enumerate(itertools.product(HEAD_DIMS, SEQLENS), first):
        if K * V > 2000 and (n // len(SEQLENS) + first) % len(SEQLENS) != n % len(SEQLENS):
            continue
        yield Case(
            decay, K, V, T, GATES[n % 5], H=1 + n % 2, HK=1, with_state=n % 7 > 1,
            cu_seqlens=packed(T) if n % 3 == 1 else None, v_first=n % 2 == 1, dtype=dtype,
        )  # fmt: skip


def both(name: str, x: Tensor) -> Tensor:
    """x beside its absolute values, as further heads; a gate beside itself."""
    dim = {"g": min(2, x.dim() - 1), "initial_state": 1}.get(name, 2)
    return torch.cat((x, x if name == "g" else x.abs()), dim)


def check(case: Case, backend: Backend) -> None:
    """Results and all gradients of a case. The reference runs it twice, side by side: as it is,
    and on absolute values, which tells what its sums are made of."""
    exact = {name: x for name, x in case.inputs().items() if x is not None}
    given = {}
    for name, x in exact.items():
        own = torch.float32 if name in ("g", "initial_state") else case.dtype
        layout = x.mT if case.v_first and name == "initial_state" else x
        given[name] = layout.to(backend.device, own, copy=True).requires_grad_()
    edges = None if case.cu_seqlens is None else list(case.cu_seqlens)
    do = torch.randn(exact["v"].shape).to(case.dtype).double()
    wide = {name: both(name, x).requires_grad_() for name, x in exact.items()}
    o, final = recurrence(
        *(wide[name] for name in "qkv"),
        wide.get("g"),
        case.K**-0.5,
        wide.get("initial_state"),
        edges,
    )
    dfinal = torch.randn(final[:, : case.H].shape).double()
    loss = (o * both("o", do)).sum() + (final * both("initial_state", dfinal)).sum()
    found = torch.autograd.grad(loss, list(wide.values()), materialize_grads=True)

    seqlens = (
        None if edges is None else torch.tensor(edges, dtype=torch.int32, device=backend.device)
    )
    got_o, got_final = chunk_scan(
        **given, cu_seqlens=seqlens, output_final_state=True, state_v_first=case.v_first
    )
    got_dfinal = dfinal.mT if case.v_first else dfinal
    gradients = torch.autograd.grad(
        [got_o, got_final], list(given.values()), [do.to(got_o), got_dfinal.to(got_final)]
    )
    results = {"o": (got_o, o.detach(), 2), "final_state": (got_final, final.detach(), 1)}
    for name, got, want in zip(exact, gradients, found):
        dim = {"g": min(2, want.dim() - 1), "initial_state": 1}.get(name, 2)
        results[name] = got, want, dim
    operands = given["q"], given["v"], given.get("g")
    for name, (got, want, dim) in results.items():
        got = got.mT if case.v_first and name.endswith("state") else got
        want, magnitude = want.chunk(2, dim)
        kind = "" if name in ("o", "final_state") else "gradient of "
        operation = "_linear_backward" if kind else "_linear_forward"
        rounds = backend.kernels and _kernels.serves(operation, *operands)
        sums = KERNEL_SUMS[case.dtype] if rounds else backend.sums
        lost = 0.0
        if rounds and case.dtype == torch.float16 and kind and name == "initial_state":
            # q times its decay since the state may be too small for fp16.
            lost = case.T * 2.0**-25 * case.K**-0.5 * do.abs().max().item() if case.T else 0.0
        assert_close(got, want, magnitude, f"{case}: {kind}{name}", sums, lost)
