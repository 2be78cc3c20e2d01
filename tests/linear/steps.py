"""Steps, one token of each sequence against states in memory: cases, and what they are held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.linear.cases import GATES
from tests.linear.compare import assert_close

SUMS = 2.0**-20  # a share of the terms' magnitudes that sums in fp32 may lose


@dataclass(frozen=True)
class StepCase:
    """Rows of a step; what it computes is the subclass's."""

    K: int
    V: int
    slots: tuple[int, ...] = (4, -1, 0, 2)
    H: int = 2
    HK: int = 1
    dtype: torch.dtype = torch.bfloat16
    v_first: bool = False
    gap: int = 0  # columns of memory behind each row of a state

    def state(self) -> Tensor:
        """[6, H, K, V] in a sea of NaN."""
        inner = (self.V, self.K) if self.v_first else (self.K, self.V)
        memory = torch.full((6, self.H, inner[0], inner[1] + self.gap), torch.nan)
        memory[..., : inner[1]] = torch.randn(6, self.H, *inner)
        return memory[..., : inner[1]]

    def inputs(self) -> list[Tensor]:
        """q, k and v"""
        shapes = ((self.HK, self.K), (self.HK, self.K), (self.H, self.V))
        return [torch.randn(len(self.slots), *shape).to(self.dtype) for shape in shapes]

    def factors(self) -> list[Tensor | None]:
        """What the step is given behind q, k and v: [rows, …], or one dimension for all rows."""
        raise NotImplementedError

    def step(self, *args: Tensor | None, scale: float = 0.3) -> Tensor:
        """o; args: inputs, factors, the states and the rows' slots."""
        raise NotImplementedError

    def exact(self, *args: Tensor | None) -> list[Tensor]:
        """o and the states of the rows in float64, with a scale of 0.3; args: inputs, factors, and
        the rows' states before, [rows, H, K, V]."""
        raise NotImplementedError

    def magnitudes(self, *args: Tensor | None) -> list[Tensor]:
        """The same sums of the terms' magnitudes, from absolute values."""
        return self.exact(*args)


def drawn(
    device: str, rows: int, K: int, V: int, dtype: torch.dtype, v_first: bool, *of_gate: int
) -> list[Tensor]:
    """q, k, v, g [rows, 16, *of_gate], states of twice as many slots, and the rows' slots."""
    q, k = (torch.randn(rows, 2, K, device=device).to(dtype) for _ in range(2))
    v = torch.randn(rows, 16, V, device=device).to(dtype)
    g = -torch.rand(rows, 16, *of_gate, device=device)
    state = torch.randn(2 * rows, 16, *((V, K) if v_first else (K, V)), device=device)
    return [q, k, v, g, state, torch.randperm(2 * rows, device=device)[:rows].int()]


def some_gates(shape: Sequence[int]) -> Tensor:
    """Any of GATES here and there."""
    rare = torch.rand(shape) < 0.3
    return torch.where(
        rare, torch.tensor(GATES)[torch.randint(len(GATES), shape)], -torch.rand(shape)
    )


def check_step(case: StepCase) -> None:
    inputs, factors, state = case.inputs(), case.factors(), case.state()
    memory = state._base if state._base is not None else state
    before, slots = memory.clone(), torch.tensor(case.slots)
    old = state.mT.clone() if case.v_first else state.clone()
    live = slots >= 0
    at = slots[live]
    o = case.step(*inputs, *factors, state, slots)
    own = [x[live] for x in inputs]
    factors = [x if x is None or x.dim() == 1 else x[live] for x in factors]
    want = case.exact(*own, *factors, old[at])
    magnitude = case.magnitudes(*(x.abs() for x in own), *factors, old[at].abs())
    new = state.mT if case.v_first else state
    assert not o[~live].any()
    assert_close(o[live], want[0], magnitude[0], f"{case}: o", SUMS)
    assert_close(new[at], want[1], magnitude[1], f"{case}: state", SUMS)
    others = torch.ones(len(old), dtype=torch.bool).index_fill(0, at, False)
    assert torch.equal(new[others], old[others])
    gaps = torch.ones(memory.shape[-1], dtype=torch.bool)
    gaps[: state.shape[-1]] = False
    assert torch.equal(memory[..., gaps].isnan(), before[..., gaps].isnan())


def check_padding(case: StepCase) -> None:
    """Slots that do not exist leave all states as they are, and their o is zero."""
    state = case.state()
    before, slots = state.clone(), torch.tensor([6, -7])
    o = case.step(*case.inputs(), *case.factors(), state, slots, scale=-0.3)
    assert torch.equal(state, before)
    assert not o.signbit().any()
    assert not o.any()


def check_neighbours(
    step: Callable[..., Tensor], given: Sequence[Tensor], state: Tensor, slots: Tensor, row: int
) -> None:
    """A row has the same bits in a batch, in the same again, and alone. given: [rows, …]."""
    found = []
    for rows in (slice(None), slice(None), slice(row, row + 1)):
        cache = state.clone()
        found.append((step(*(x[rows] for x in given), cache, slots[rows]), cache))
    (o, cache), (same, same_cache), (alone, alone_cache) = found
    assert torch.equal(o, same)
    assert torch.equal(cache, same_cache)
    assert torch.equal(o[row : row + 1], alone)
    assert torch.equal(cache[slots[row]], alone_cache[slots[row]])
