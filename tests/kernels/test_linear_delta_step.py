"""The delta rule's step against float64, on the kernel that is compiled for the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flash_attn.linear import (
    _delta_step,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_step,
)
from tests.kernels import library
from tests.kernels.linear_results import poison_step
from tests.linear.steps import StepCase, check_neighbours, check_padding, check_step, some_gates

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEAD_DIMS = (1, 7, 8, 16, 60, 100, 128, 256)


@pytest.fixture(params=[80, 90], autouse=True)
def gpu(request, monkeypatch) -> Iterator[list[int]]:
    """Rows of each call of the kernel, whose o begins as NaN."""
    with library.serving(monkeypatch, request.param):
        yield poison_step(monkeypatch, "delta_step")


@dataclass(frozen=True)
class Step(StepCase):
    gated: bool = True
    with_beta: bool = True
    normalizes: bool = False
    sigmoid: float = 0.0  # what the sigmoid of beta is multiplied by; 0: none is taken
    wide: bool = True  # g and beta are fp32

    def factors(self) -> list[Tensor | None]:
        """g and beta [rows, H]"""
        shape, dtype = (len(self.slots), self.H), FP32 if self.wide else self.dtype
        g, beta = some_gates(shape), torch.rand(shape) * (4 if self.sigmoid else 1)
        return [g.to(dtype) if self.gated else None, beta.to(dtype) if self.with_beta else None]

    def step(self, *args: Tensor | None, scale: float = 0.3) -> Tensor:
        return recurrent_gated_delta_rule_step(
            *args, scale, self.normalizes, self.sigmoid > 0, self.sigmoid == 2, self.v_first
        )

    def exact(self, *args: Tensor | None, sign: int = -1) -> list[Tensor]:
        q, k, v, g, beta, S = (x if x is None else x.double() for x in args)
        if self.normalizes:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(self.H // self.HK, 1) for x in (q, k))
        if g is not None:
            S = S * g.exp()[..., None, None]
        u = v + sign * (k[..., None] * S).sum(-2)
        if beta is not None:
            of = self.sigmoid * beta.sigmoid() if self.sigmoid else beta
            u = u * of[..., None]
        S = S + k[..., None] * u[..., None, :]
        return [0.3 * (q[..., None] * S).sum(-2), S]

    def magnitudes(self, *args: Tensor | None) -> list[Tensor]:
        return self.exact(*args, sign=1)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("K", HEAD_DIMS)
def test_head_dims(K, v_first, gpu):
    for n, V in enumerate(HEAD_DIMS):
        kind = dict(v_first=v_first, dtype=(BF16, FP16, FP32)[n % 3], normalizes=n % 2 == 1)
        check_step(Step(K, V, sigmoid=n % 3, **kind))
        check_step(Step(K, V, (0,), H=1, gap=4 * (n % 2), **kind))
    # A state of one row or column may have strides that no kernel is promised.
    assert gpu == [4, 1] * len(HEAD_DIMS) or K == 1


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("v_first", [False, True])
def test_gates_and_betas(dtype, v_first):
    kind = dict(H=6, HK=3, dtype=dtype, v_first=v_first, gap=8)
    for normalizes in (False, True):
        check_step(Step(24, 40, gated=False, with_beta=False, normalizes=normalizes, **kind))
        check_step(Step(24, 40, with_beta=False, sigmoid=1.0, normalizes=normalizes, **kind))
        check_step(Step(24, 40, gated=False, sigmoid=1.0, normalizes=normalizes, **kind))
        check_step(Step(24, 40, sigmoid=2.0, wide=False, normalizes=normalizes, **kind))


def test_more_rows_than_a_tile_has(gpu):
    check_step(Step(257, 8))
    assert not gpu


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(16, 32), (60, 64), (128, 128), (256, 48), (33, 7)])
def test_neighbours_change_no_bit(K, V, v_first):
    """A batch that fills the GPU has other tiles of V than one row alone, and the same bits."""
    case = Step(K, V, tuple(range(6)), H=4, HK=2, v_first=v_first, normalizes=True)
    given = case.inputs() + case.factors()
    check_neighbours(case.step, given, case.state(), torch.arange(6), row=3)


def test_slots_that_do_not_exist_are_padding():
    check_padding(Step(8, 8, (0, 1)))


@pytest.mark.parametrize("v_first", [False, True])
def test_numbers_that_are_not_finite(v_first):
    """A state of NaN and infinity below a decay of 0 is what torch operations make of it."""
    case = Step(12, 8, (0, 1), v_first=v_first)
    inputs, (g, beta), state = case.inputs(), case.factors(), case.state()
    g[:] = -torch.inf
    rows = state.mT if v_first else state
    rows[0, :, 3, 1], rows[0, :, 6, 2], rows[1, :, 1, 5] = torch.inf, torch.nan, -torch.inf
    other, slots = state.clone(), torch.arange(2, dtype=torch.int32)
    o = case.step(*inputs, g, beta, state, slots)
    cache = other.mT if v_first else other
    want = _delta_step.step(*inputs, g, beta, cache, slots, 0.3, False, 0.0)
    torch.testing.assert_close(state, other, equal_nan=True)
    torch.testing.assert_close(o, want, equal_nan=True)


def test_a_token_of_the_recurrence(gpu):
    case = Step(16, 24, (0, 1, 2), H=4, HK=2)
    given, state = case.inputs() + case.factors(), torch.randn(3, 4, 16, 24)
    before = state.clone()
    o, final = fused_recurrent_gated_delta_rule(
        *(x[:, None] for x in given), 0.3, state, output_final_state=True
    )
    assert torch.equal(state, before)
    want = case.exact(*given, state)
    torch.testing.assert_close(o[:, 0], want[0].bfloat16(), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(final, want[1].float())
    o, _ = fused_recurrent_gated_delta_rule(*(x[:, None] for x in given))
    want = case.exact(*given, torch.zeros_like(state))
    torch.testing.assert_close(o[:, 0], (want[0] * 0.25 / 0.3).bfloat16(), rtol=1e-2, atol=1e-3)
    assert gpu == [3, 3]
