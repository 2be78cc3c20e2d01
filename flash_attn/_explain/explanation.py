"""What ``flash_attn.explain`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Explanation:
    """What a call would use.

    operation: the op that would be called. call: the problem in one line. backend: "cpu", "cuda"
    or "none" (the call would raise). why: the reason for the backend and kernel. kernel: the
    variant's name, or what the CPU runs. tile: (rows, keys), None where none is fixed ahead.
    splits: parts that a sequence's keys are cut into at most; of a call with a cache their number
    follows from the lengths, on the GPU (a plan's pieces are of all sequences). rejected: (name,
    why not) of the others. few_queries: of a batch that two kernels share, each sequence by its own
    length, few_kernel serves those of up to so many queries, and splits are its. slow: why the call
    takes longer than one that asks for a little less. plan: how a call goes through its tiles.
    microseconds: what that is predicted to take. choices: (plan, predicted microseconds) of all
    that the kernel could do, the shortest first.
    """

    operation: str
    call: str
    backend: str
    why: str
    kernel: str | None = None
    tile: tuple[int, int] | None = None
    splits: int = 1
    rejected: tuple[tuple[str, str], ...] = ()
    variant: dict[str, Any] = field(default_factory=dict)
    few_queries: int = 0
    few_kernel: str | None = None
    slow: tuple[str, ...] = ()
    plan: str = ""
    microseconds: float = 0.0
    choices: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        rows = [
            ("operation", self.operation),
            ("call", self.call),
            ("backend", self.backend),
            ("kernel", self.kernel or "none: the call raises NotImplementedError"),
        ]
        if self.few_kernel is not None:
            rows.append(("and", f"{self.few_kernel} for sequences of up to {self.few_queries}"))
        if self.tile is not None:
            rows.append(("tile", f"{self.tile[0]} rows x {self.tile[1]} keys"))
        if self.backend == "cuda":
            rows.append(("splits", f"{'up to ' if self.splits > 1 else ''}{self.splits}"))
        if self.plan:
            rows.append(("plan", f"{self.plan}: {self.microseconds:.0f} µs predicted"))
            others = [choice for choice in self.choices if choice[0] != self.plan]
            rows += [("or", f"{text}: {us:.0f} µs") for text, us in others[:1]]
        rows.append(("why", self.why))
        rows += [("slow", reason) for reason in self.slow]
        rows += [("not" if i == 0 else "", f"{n}: {w}") for i, (n, w) in enumerate(self.rejected)]
        return "\n".join(f"{name:<10} {value}" for name, value in rows)
