"""What rounding to 16 bits may do to results of the compiled kernels.

With u half a last digit, a term of o = Σ q k v e^(...) is rounded at most twice: its weight (or k's
decayed number and the state before a chunk), each by u at most. So, whatever the inputs,

    |o - exact| <= u |o| + 2 u Σ |terms|        |S - exact| <= u Σ |terms|

Sums of n terms of random signs have √n times less, because their errors are independent. Those are
held to that, because it does not hide a token that is missing among hundreds:

    |o - exact| <= u |o| + z u √(Σ terms²)      |S - exact| <= z u √(Σ terms²)
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.linear import chunk_scan
from tests.linear.cases import Case
from tests.linear.compare import HALF_DIGIT, hold
from tests.linear.reference import recurrence

_STATES = 2.0**-8  # states before chunks are bf16
_SUMS = 2.0**-17  # of fp32
_SMALLEST = {torch.bfloat16: 1e-30, torch.float16: 2.0**-25}  # half of what a number may be
_Z = 6.0  # a last digit's error is u / √3 at most on average: ten times as much as that


def check_results(
    case: Case, device: str, inputs: dict[str, Tensor | None], random_signs: bool = True
) -> None:
    """o and the final state of a case. inputs: as of ``case.inputs()``, exact in its dtype."""
    edges = None if case.cu_seqlens is None else list(case.cu_seqlens)
    exact = {name: x for name, x in inputs.items() if x is not None}
    want = _recurrence(case, exact, edges)
    of_o, of_state = _of_terms(case, exact, edges, random_signs)
    given = {}
    for name, x in exact.items():
        own = torch.float32 if name in ("g", "initial_state") else case.dtype
        x = x.mT if case.v_first and name == "initial_state" else x
        given[name] = x.to(device, own, copy=True)
    seqlens = None if edges is None else torch.tensor(edges, dtype=torch.int32, device=device)
    o, state = chunk_scan(
        **given, cu_seqlens=seqlens, output_final_state=True, state_v_first=case.v_first
    )
    state = state.mT if case.v_first else state
    own = HALF_DIGIT[case.dtype]
    of_k = own if "g" in exact else 0.0  # without decays k is not rounded
    largest_v = exact["v"].abs().max() if exact["v"].numel() else 0.0
    lost = _SMALLEST[case.dtype] * (case.T * largest_v + 1)
    hold(f"{case}: o", o, want[0], own * want[0].abs() + max(own, _STATES) * of_o + lost)
    lost = lost if "g" in exact else 1e-30
    hold(f"{case}: final state", state, want[1], (of_k + _SUMS) * of_state + lost)


def _of_terms(
    case: Case, exact: dict[str, Tensor], edges: list[int] | None, random_signs: bool
) -> list[Tensor]:
    """What errors of o and of the final state may be, in u."""
    if not random_signs:
        magnitudes = {name: x if name == "g" else x.abs() for name, x in exact.items()}
        o, state = _recurrence(case, magnitudes, edges)
        return [2 * o, state]
    squares = {name: 2 * x if name == "g" else x.square() for name, x in exact.items()}
    o, state = (x.sqrt() for x in _recurrence(case, squares, edges))
    return [_Z * case.K**-0.25 * o, _Z * state]  # the scale is squared as well


def _recurrence(case: Case, x: dict[str, Tensor], edges: list[int] | None) -> list[Tensor]:
    tensors = (x["q"], x["k"], x["v"], x.get("g"))
    return list(recurrence(*tensors, case.K**-0.5, x.get("initial_state"), edges))
