"""The step of linear attention against float64, on the kernels that are compiled for the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flash_attn.linear import (
    _step,
    fused_recurrent_gla,
    recurrent_step,
    selective_state_update,
)
from tests.kernels import library
from tests.kernels.linear_results import poison_step
from tests.linear.cases import DECAYS, HEAD_DIMS
from tests.linear.steps import StepCase, check_neighbours, check_padding, check_step, some_gates

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=[80, 90], autouse=True)
def gpu(request, monkeypatch) -> Iterator[list[int]]:
    """Rows of each call of the kernel, whose o begins as NaN."""
    with library.serving(monkeypatch, request.param):
        yield poison_step(monkeypatch, "step")


@dataclass(frozen=True)
class Step(StepCase):
    decay: str = "none"

    def factors(self) -> list[Tensor | None]:
        """The gates."""
        if self.decay == "none":
            return [None]
        rows = len(self.slots)
        shapes = {"head": (self.H,), "scalar": (rows, self.H), "vector": (rows, self.H, self.K)}
        return [some_gates(shapes[self.decay])]

    def step(self, *args: Tensor | None, scale: float = 0.3) -> Tensor:
        return recurrent_step(*args, scale, self.v_first)

    def exact(self, *args: Tensor | None) -> list[Tensor]:
        q, k, v, g, S = (x if x is None else x.double() for x in args)
        q, k = (x.repeat_interleave(self.H // self.HK, 1) for x in (q, k))
        if g is not None:
            factor = g.exp()
            by_head = factor[None, :, None, None] if g.dim() == 1 else factor[..., None]
            S = S * (by_head if g.dim() != 2 else by_head[..., None])
        S = S + k[..., None] * v[..., None, :]
        return [0.3 * (q[..., None] * S).sum(-2), S]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("K", HEAD_DIMS)
def test_head_dims(K, v_first, gpu):
    for n, V in enumerate(HEAD_DIMS):
        first, second = DECAYS[n % 4], DECAYS[(n + 2) % 4]
        check_step(Step(K, V, decay=first, v_first=v_first, dtype=(BF16, FP16, FP32)[n % 3]))
        check_step(Step(K, V, (0,), H=1, decay=second, v_first=v_first, gap=4 * (n % 2)))
    # A state of one row or column may have strides that no kernel is promised.
    assert gpu == [4, 1] * len(HEAD_DIMS) or K == 1


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("decay", DECAYS)
def test_decays(decay, dtype):
    for v_first in (False, True):
        check_step(Step(24, 40, H=6, HK=3, dtype=dtype, v_first=v_first, gap=8, decay=decay))
        check_step(Step(33, 9, H=4, HK=4, dtype=dtype, v_first=v_first, gap=3, decay=decay))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("K", [600, 1100])
def test_more_rows_than_threads_have_under_way(K, v_first):
    check_step(Step(K, 20, (1,), H=1, v_first=v_first, decay="vector"))
    check_step(Step(K + 1, 3, (1,), H=1, v_first=v_first, decay="scalar"))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(16, 32), (60, 64), (128, 128), (300, 48), (33, 7)])
def test_neighbours_change_no_bit(K, V, v_first):
    """A batch that fills the GPU has other tiles of V than one row alone, and the same bits."""
    case = Step(K, V, tuple(range(6)), H=4, HK=2, v_first=v_first, decay="vector")
    given = case.inputs() + case.factors()
    check_neighbours(case.step, given, case.state(), torch.arange(6), row=3)


def test_every_row_has_its_own_state_without_slots():
    case = Step(20, 12, (0, 1, 2, 3, 4, 5), decay="scalar")
    given, state = case.inputs() + case.factors(), case.state()
    other = state.clone()
    o = case.step(*given, state, None)
    assert torch.equal(o, case.step(*given, other, torch.arange(6)))
    assert torch.equal(state, other)


def test_slots_that_do_not_exist_are_padding():
    check_padding(Step(8, 8, (0, 1)))


@pytest.mark.parametrize("v_first", [False, True])
def test_numbers_that_are_not_finite(v_first):
    """A state of NaN and infinity below a decay of 0 is what torch operations make of it."""
    case = Step(12, 8, (0, 1), v_first=v_first, decay="vector")
    inputs, g, state = case.inputs(), torch.zeros(2, 2, 12), case.state()
    g[..., ::3] = -torch.inf
    state[0, :, 3], state[0, :, 6], state[1, :, 1] = torch.inf, torch.nan, -torch.inf
    other, slots = state.clone(), torch.arange(2, dtype=torch.int32)
    o = case.step(*inputs, g, state, slots)
    want = _step.step(*inputs, g, other.mT if v_first else other, slots, 0.3)
    torch.testing.assert_close(state, other, equal_nan=True)
    torch.testing.assert_close(o, want, equal_nan=True)


def test_a_token_of_gla(gpu):
    q, k, v = (torch.randn(3, 1, 2, d).bfloat16() for d in (16, 16, 24))
    g, state = -torch.rand(3, 1, 2, 16), torch.randn(3, 2, 16, 24)
    before = state.clone()
    o, final = fused_recurrent_gla(q, k, v, g, initial_state=state, output_final_state=True)
    assert torch.equal(state, before)
    case = Step(16, 24, (0, 1, 2), HK=2, decay="vector")
    want = case.exact(*(x[:, 0] for x in (q, k, v, g)), state)
    torch.testing.assert_close(o[:, 0], (want[0] * 16**-0.5 / 0.3).bfloat16(), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(final, want[1].float())
    assert gpu == [3]


def test_mambas_step(gpu):
    state, x = torch.randn(5, 4, 24, 16), torch.randn(3, 4, 24).bfloat16()
    B, C = (torch.randn(3, 2, 16).bfloat16() for _ in range(2))
    dt, A = torch.rand(3, 4), -torch.rand(4)
    wide, of_heads = dt[..., None].expand(-1, -1, 24), A[:, None, None].expand(-1, 24, 16)
    slots = torch.tensor([3, -1, 1])
    before = state.clone()
    out = selective_state_update(state, x, wide, of_heads, B, C, state_batch_indices=slots)
    v = (x.float() * dt[..., None]).bfloat16()
    other = before.clone()
    want = _step.step(C, B, v, dt * A, other.mT, slots, 1.0)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(state, other)
    assert gpu == [3]
