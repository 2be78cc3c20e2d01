"""The step of linear attention against float64, on the kernels that are compiled for the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flash_attn.linear import (
    _kernels,
    _step,
    fused_recurrent_gla,
    recurrent_step,
    selective_state_update,
)
from tests.kernels import library
from tests.linear.compare import assert_close

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEAD_DIMS = (1, 7, 8, 16, 60, 100, 128, 320)
DECAYS = ("none", "head", "scalar", "vector")
GATES = (0.0, -1e-3, -5.0, -50.0, -torch.inf)
SUMS = 2.0**-20  # a share of the terms' magnitudes that sums in fp32 may lose


@pytest.fixture(params=[80, 90], autouse=True)
def gpu(request, monkeypatch) -> Iterator[list[int]]:
    """Rows of each call of the kernel, whose o begins as NaN."""
    calls: list[int] = []
    with library.serving(monkeypatch, request.param):
        kernel = _kernels.step

        def step(*args) -> None:
            calls.append(len(args[0]))
            args[-1].fill_(torch.nan)
            kernel(*args)

        monkeypatch.setattr(_kernels, "step", step)
        yield calls


@dataclass(frozen=True)
class Step:
    decay: str
    K: int
    V: int
    slots: tuple[int, ...] = (4, -1, 0, 2)
    H: int = 2
    HK: int = 1
    dtype: torch.dtype = BF16
    v_first: bool = False
    gap: int = 0  # columns of memory behind each row of a state

    def gates(self) -> Tensor | None:
        if self.decay == "none":
            return None
        rows = len(self.slots)
        shapes = {"head": (self.H,), "scalar": (rows, self.H), "vector": (rows, self.H, self.K)}
        g = -torch.rand(shapes[self.decay])
        rare = torch.rand(g.shape) < 0.3
        return torch.where(rare, torch.tensor(GATES)[torch.randint(len(GATES), g.shape)], g)

    def state(self) -> Tensor:
        """[6, H, K, V] in a sea of NaN."""
        inner = (self.V, self.K) if self.v_first else (self.K, self.V)
        memory = torch.full((6, self.H, inner[0], inner[1] + self.gap), torch.nan)
        memory[..., : inner[1]] = torch.randn(6, self.H, *inner)
        return memory[..., : inner[1]]

    def inputs(self) -> list[Tensor]:
        shapes = ((self.HK, self.K), (self.HK, self.K), (self.H, self.V))
        return [torch.randn(len(self.slots), *shape).to(self.dtype) for shape in shapes]


def exact(case: Step, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor) -> list[Tensor]:
    """o and the states of the rows in float64; S: their states before, [rows, H, K, V]."""
    q, k, v, S = (x.double() for x in (q, k, v, S))
    q, k = (x.repeat_interleave(case.H // case.HK, 1) for x in (q, k))
    if g is not None:
        factor = g.double().exp()
        by_head = factor[None, :, None, None] if g.dim() == 1 else factor[..., None]
        S = S * (by_head if g.dim() != 2 else by_head[..., None])
    S = S + k[..., None] * v[..., None, :]
    return [0.3 * (q[..., None] * S).sum(-2), S]


def check(case: Step) -> None:
    inputs, g, state = case.inputs(), case.gates(), case.state()
    memory = state._base if state._base is not None else state
    before, slots = memory.clone(), torch.tensor(case.slots)
    old = state.mT.clone() if case.v_first else state.clone()
    live = slots >= 0
    at = slots[live]
    o = recurrent_step(*inputs, g, state, slots, 0.3, case.v_first)
    own = [x[live] for x in inputs]
    gates = g if g is None or g.dim() == 1 else g[live]
    want = exact(case, *own, gates, old[at])
    magnitude = exact(case, *(x.abs() for x in own), gates, old[at].abs())
    new = state.mT if case.v_first else state
    assert not o[~live].any()
    assert_close(o[live], want[0], magnitude[0], f"{case}: o", SUMS)
    assert_close(new[at], want[1], magnitude[1], f"{case}: state", SUMS)
    others = torch.ones(len(old), dtype=torch.bool).index_fill(0, at, False)
    assert torch.equal(new[others], old[others])
    gaps = torch.ones(memory.shape[-1], dtype=torch.bool)
    gaps[: state.shape[-1]] = False
    assert torch.equal(memory[..., gaps].isnan(), before[..., gaps].isnan())


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("K", HEAD_DIMS)
def test_head_dims(K, v_first, gpu):
    for n, V in enumerate(HEAD_DIMS):
        check(Step(DECAYS[n % 4], K, V, v_first=v_first, dtype=(BF16, FP16, FP32)[n % 3]))
        check(Step(DECAYS[(n + 2) % 4], K, V, (0,), H=1, v_first=v_first, gap=4 * (n % 2)))
    # A state of one row or column may have strides that no kernel is promised.
    assert gpu == [4, 1] * len(HEAD_DIMS) or K == 1


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("decay", DECAYS)
def test_decays(decay, dtype):
    for v_first in (False, True):
        check(Step(decay, 24, 40, H=6, HK=3, dtype=dtype, v_first=v_first, gap=8))
        check(Step(decay, 33, 9, H=4, HK=4, dtype=dtype, v_first=v_first, gap=3))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("K", [600, 1100])
def test_more_rows_than_threads_have_under_way(K, v_first):
    check(Step("vector", K, 20, (1,), H=1, v_first=v_first))
    check(Step("scalar", K + 1, 3, (1,), H=1, v_first=v_first))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(16, 32), (60, 64), (128, 128), (300, 48), (33, 7)])
def test_neighbours_change_no_bit(K, V, v_first):
    """A batch that fills the GPU has other tiles of V than one row alone, and the same bits."""
    case = Step("vector", K, V, tuple(range(6)), H=4, HK=2, v_first=v_first)
    inputs, g, state = case.inputs(), case.gates(), case.state()
    found = []
    for rows in (slice(0, 6), slice(0, 6), slice(3, 4)):
        cache = state.clone()
        own = [x[rows] for x in (*inputs, g)]
        o = recurrent_step(*own, cache, torch.arange(6)[rows], 0.3, v_first)
        found.append((o, cache))
    (o, cache), (same, same_cache), (alone, alone_cache) = found
    assert torch.equal(o, same)
    assert torch.equal(cache, same_cache)
    assert torch.equal(o[3:4], alone)
    assert torch.equal(cache[3], alone_cache[3])


def test_every_row_has_its_own_state_without_slots():
    case = Step("scalar", 20, 12, (0, 1, 2, 3, 4, 5))
    inputs, g, state = case.inputs(), case.gates(), case.state()
    other = state.clone()
    o = recurrent_step(*inputs, g, state, None, 0.3)
    assert torch.equal(o, recurrent_step(*inputs, g, other, torch.arange(6), 0.3))
    assert torch.equal(state, other)


def test_slots_that_do_not_exist_are_padding():
    case = Step("none", 8, 8, (0, 1))
    state = case.state()
    before = state.clone()
    o = recurrent_step(*case.inputs(), None, state, torch.tensor([6, -7]), -0.3)
    assert torch.equal(state, before)
    assert not o.signbit().any()
    assert not o.any()


@pytest.mark.parametrize("v_first", [False, True])
def test_numbers_that_are_not_finite(v_first):
    """A state of NaN and infinity below a decay of 0 is what torch operations make of it."""
    case = Step("vector", 12, 8, (0, 1), v_first=v_first)
    inputs, g, state = case.inputs(), torch.zeros(2, 2, 12), case.state()
    g[..., ::3] = -torch.inf
    state[0, :, 3], state[0, :, 6], state[1, :, 1] = torch.inf, torch.nan, -torch.inf
    other, slots = state.clone(), torch.arange(2, dtype=torch.int32)
    o = recurrent_step(*inputs, g, state, slots, 0.3, v_first)
    want = _step.step(*inputs, g, other.mT if v_first else other, slots, 0.3)
    torch.testing.assert_close(state, other, equal_nan=True)
    torch.testing.assert_close(o, want, equal_nan=True)


def test_a_token_of_gla(gpu):
    q, k, v = (torch.randn(3, 1, 2, d).bfloat16() for d in (16, 16, 24))
    g, state = -torch.rand(3, 1, 2, 16), torch.randn(3, 2, 16, 24)
    before = state.clone()
    o, final = fused_recurrent_gla(q, k, v, g, initial_state=state, output_final_state=True)
    assert torch.equal(state, before)
    case = Step("vector", 16, 24, (0, 1, 2), HK=2)
    want = exact(case, *(x[:, 0] for x in (q, k, v, g)), state)
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
