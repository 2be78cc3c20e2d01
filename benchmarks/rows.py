"""What a preset yields, and what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# Contenders that our time is divided by.
PEERS = ("fa3", "fa2", "flashmla", "cudnn", "efficient", "flex", "sdpa", "copy")


@dataclass
class Row:
    """One problem, every contender. ``rates`` is in ``unit``; both are None where one raised.

    A row of a sweep is at ``x`` of ``axis``.
    """

    preset: str
    problem: str
    unit: str
    milliseconds: dict[str, float | None]
    rates: dict[str, float | None] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # contender → why it has no figure
    axis: str = ""
    x: float = 0.0

    @property
    def kind(self) -> str:
        """The preset, and the kind of call where that says more."""
        call = self.problem.split()[0]
        name = self.preset if call == self.preset else f"{self.preset}: {call}"
        return f"{name} by {self.axis}" if self.axis else name

    @property
    def ratio(self) -> float | None:
        """Our time over the fastest peer's."""
        others = [t for name, t in self.milliseconds.items() if t and name in PEERS]
        mine = self.milliseconds.get("ours")
        return mine / min(others) if mine and others else None


@dataclass(frozen=True)
class Options:
    device: torch.device
    dims: set[int] | None = None
    seqlens: set[int] | None = None
    with_standard: bool = False
    expand_k: float = 0.5  # of linear: columns of k for each column of v


def rate(amount: float, scale: float, times: dict[str, float | None]) -> dict:
    return {name: amount / (t * 1e-3) / scale if t else None for name, t in times.items()}
