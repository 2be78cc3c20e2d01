"""The delta rule's step against float64, on the kernel that is compiled for the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flash_attn.linear import (
    _delta_step,
    _kernels,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_step,
)
from tests.kernels import library
from tests.linear.compare import assert_close

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEAD_DIMS = (1, 7, 8, 16, 60, 100, 128, 256)
GATES = (0.0, -1e-3, -5.0, -50.0, -torch.inf)
SUMS = 2.0**-20  # a share of the terms' magnitudes that sums in fp32 may lose


@pytest.fixture(params=[80, 90], autouse=True)
def gpu(request, monkeypatch) -> Iterator[list[int]]:
    """Rows of each call of the kernel, whose o begins as NaN."""
    calls: list[int] = []
    with library.serving(monkeypatch, request.param):
        kernel = _kernels.delta_step

        def step(*args) -> None:
            calls.append(len(args[0]))
            args[-1].fill_(torch.nan)
            kernel(*args)

        monkeypatch.setattr(_kernels, "delta_step", step)
        yield calls


@dataclass(frozen=True)
class Step:
    K: int
    V: int
    slots: tuple[int, ...] = (4, -1, 0, 2)
    H: int = 2
    HK: int = 1
    dtype: torch.dtype = BF16
    v_first: bool = False
    gap: int = 0  # columns of memory behind each row of a state
    gated: bool = True
    with_beta: bool = True
    normalizes: bool = False
    sigmoid: float = 0.0  # what the sigmoid of beta is multiplied by; 0: none is taken
    wide: bool = True  # g and beta are fp32

    def per_head(self) -> tuple[Tensor | None, Tensor | None]:
        """g and beta [rows, H]"""
        shape, dtype = (len(self.slots), self.H), FP32 if self.wide else self.dtype
        g, beta = -torch.rand(shape), torch.rand(shape) * (4 if self.sigmoid else 1)
        rare = torch.rand(shape) < 0.3
        g = torch.where(rare, torch.tensor(GATES)[torch.randint(len(GATES), shape)], g)
        return g.to(dtype) if self.gated else None, beta.to(dtype) if self.with_beta else None

    def state(self) -> Tensor:
        """[6, H, K, V] in a sea of NaN."""
        inner = (self.V, self.K) if self.v_first else (self.K, self.V)
        memory = torch.full((6, self.H, inner[0], inner[1] + self.gap), torch.nan)
        memory[..., : inner[1]] = torch.randn(6, self.H, *inner)
        return memory[..., : inner[1]]

    def inputs(self) -> list[Tensor]:
        shapes = ((self.HK, self.K), (self.HK, self.K), (self.H, self.V))
        return [torch.randn(len(self.slots), *shape).to(self.dtype) for shape in shapes]

    def flags(self) -> dict[str, bool]:
        return {
            "use_qk_l2norm_in_kernel": self.normalizes,
            "use_beta_sigmoid_in_kernel": self.sigmoid > 0,
            "allow_neg_eigval": self.sigmoid == 2,
            "state_v_first": self.v_first,
        }


def exact(
    case: Step, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, S: Tensor,
    sign: int = -1,
) -> list[Tensor]:  # fmt: skip
    """o and the states of the rows in float64; S: their states before, [rows, H, K, V]. With a
    sign of 1 and absolute values: the sums of the terms' magnitudes."""
    q, k, v, S = (x.double() for x in (q, k, v, S))
    if case.normalizes:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(case.H // case.HK, 1) for x in (q, k))
    if g is not None:
        S = S * g.double().exp()[..., None, None]
    u = v + sign * (k[..., None] * S).sum(-2)
    if beta is not None:
        of = case.sigmoid * beta.double().sigmoid() if case.sigmoid else beta.double()
        u = u * of[..., None]
    S = S + k[..., None] * u[..., None, :]
    return [0.3 * (q[..., None] * S).sum(-2), S]


def check(case: Step) -> None:
    inputs, per_head, state = case.inputs(), case.per_head(), case.state()
    memory = state._base if state._base is not None else state
    before, slots = memory.clone(), torch.tensor(case.slots)
    old = state.mT.clone() if case.v_first else state.clone()
    live = slots >= 0
    at = slots[live]
    o = recurrent_gated_delta_rule_step(*inputs, *per_head, state, slots, 0.3, **case.flags())
    own, of_head = [x[live] for x in inputs], [x if x is None else x[live] for x in per_head]
    want = exact(case, *own, *of_head, old[at])
    magnitude = exact(case, *(x.abs() for x in own), *of_head, old[at].abs(), sign=1)
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
        kind = dict(v_first=v_first, dtype=(BF16, FP16, FP32)[n % 3], normalizes=n % 2 == 1)
        check(Step(K, V, sigmoid=n % 3, **kind))
        check(Step(K, V, (0,), H=1, gap=4 * (n % 2), **kind))
    # A state of one row or column may have strides that no kernel is promised.
    assert gpu == [4, 1] * len(HEAD_DIMS) or K == 1


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("v_first", [False, True])
def test_gates_and_betas(dtype, v_first):
    kind = dict(H=6, HK=3, dtype=dtype, v_first=v_first, gap=8)
    for normalizes in (False, True):
        check(Step(24, 40, gated=False, with_beta=False, normalizes=normalizes, **kind))
        check(Step(24, 40, with_beta=False, sigmoid=1.0, normalizes=normalizes, **kind))
        check(Step(24, 40, gated=False, sigmoid=1.0, normalizes=normalizes, **kind))
        check(Step(24, 40, sigmoid=2.0, wide=False, normalizes=normalizes, **kind))


def test_more_rows_than_registers_hold(gpu):
    check(Step(257, 8))
    assert not gpu


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(16, 32), (60, 64), (128, 128), (256, 48), (33, 7)])
def test_neighbours_change_no_bit(K, V, v_first):
    """A batch that fills the GPU has other tiles of V than one row alone, and the same bits."""
    case = Step(K, V, tuple(range(6)), H=4, HK=2, v_first=v_first, normalizes=True)
    inputs, per_head, state = case.inputs(), case.per_head(), case.state()
    found = []
    for rows in (slice(0, 6), slice(0, 6), slice(3, 4)):
        cache, slots = state.clone(), torch.arange(6)[rows]
        own = [x[rows] for x in (*inputs, *per_head)]
        o = recurrent_gated_delta_rule_step(*own, cache, slots, 0.3, **case.flags())
        found.append((o, cache))
    (o, cache), (same, same_cache), (alone, alone_cache) = found
    assert torch.equal(o, same)
    assert torch.equal(cache, same_cache)
    assert torch.equal(o[3:4], alone)
    assert torch.equal(cache[3], alone_cache[3])


def test_slots_that_do_not_exist_are_padding():
    case = Step(8, 8, (0, 1))
    state = case.state()
    before = state.clone()
    slots = torch.tensor([6, -7])
    o = recurrent_gated_delta_rule_step(*case.inputs(), *case.per_head(), state, slots, -0.3)
    assert torch.equal(state, before)
    assert not o.signbit().any()
    assert not o.any()


@pytest.mark.parametrize("v_first", [False, True])
def test_numbers_that_are_not_finite(v_first):
    """A state of NaN and infinity below a decay of 0 is what torch operations make of it."""
    case = Step(12, 8, (0, 1), v_first=v_first)
    inputs, (g, beta), state = case.inputs(), case.per_head(), case.state()
    g[:] = -torch.inf
    rows = state.mT if v_first else state
    rows[0, :, 3, 1], rows[0, :, 6, 2], rows[1, :, 1, 5] = torch.inf, torch.nan, -torch.inf
    other, slots = state.clone(), torch.arange(2, dtype=torch.int32)
    o = recurrent_gated_delta_rule_step(*inputs, g, beta, state, slots, 0.3, **case.flags())
    cache = other.mT if v_first else other
    want = _delta_step.step(*inputs, g, beta, cache, slots, 0.3, False, 0.0)
    torch.testing.assert_close(state, other, equal_nan=True)
    torch.testing.assert_close(o, want, equal_nan=True)


def test_a_token_of_the_recurrence(gpu):
    case = Step(16, 24, (0, 1, 2), H=4, HK=2)
    inputs, per_head, state = case.inputs(), case.per_head(), torch.randn(3, 4, 16, 24)
    before = state.clone()
    o, final = fused_recurrent_gated_delta_rule(
        *(x[:, None] for x in (*inputs, *per_head)), 0.3, state, output_final_state=True
    )
    assert torch.equal(state, before)
    want = exact(case, *inputs, *per_head, state)
    torch.testing.assert_close(o[:, 0], want[0].bfloat16(), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(final, want[1].float())
    o, _ = fused_recurrent_gated_delta_rule(*(x[:, None] for x in (*inputs, *per_head)))
    want = exact(case, *inputs, *per_head, torch.zeros_like(state))
    torch.testing.assert_close(o[:, 0], (want[0] * 0.25 / 0.3).bfloat16(), rtol=1e-2, atol=1e-3)
    assert gpu == [3, 3]
