"""Linear attention's kernels against its recurrence in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flash_attn.linear import chunk_scan
from tests.kernels import library
from tests.kernels.linear_results import poison_forward
from tests.linear.cases import GATES, Case, packed
from tests.linear.reference import recurrence
from tests.linear.rounding import check_results

BF16, FP16 = torch.bfloat16, torch.float16
SMALL_GPU = 120  # 99 KiB of shared memory
TOKEN_DECAYS = ("scalar", "vector")


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[int]:
    """Tokens of each call of the kernels, whose results begin as NaN."""
    return poison_forward(monkeypatch, "forward")


@pytest.fixture(params=[80, 90, SMALL_GPU])
def gpu(request, monkeypatch) -> Iterator[int]:
    with library.serving(monkeypatch, request.param):
        yield request.param


@pytest.fixture
def large(monkeypatch) -> Iterator[None]:
    with library.serving(monkeypatch, 80):
        yield


def mixed(case: Case) -> dict[str, Tensor | None]:
    """The case's inputs, with any of the gates at any token."""
    inputs = case.inputs()
    if inputs["g"] is not None:
        shape = inputs["g"].shape
        small = -0.1 * torch.rand(shape).double()
        drawn = torch.tensor(GATES).double()[torch.randint(len(GATES), shape)]
        rare = torch.rand(shape) < 0.04
        inputs["g"] = torch.where(rare, drawn, small).float().double()
    return inputs


def check(case: Case) -> None:
    check_results(case, "cpu", mixed(case))


def check_a_sequence_alone(*tensors: Tensor) -> None:
    """Of 300 tokens of q, k, v and g in three sequences: the second has the same bits alone."""
    edges = torch.tensor([0, 37, 237, 300])
    o, states = chunk_scan(*tensors, output_final_state=True, cu_seqlens=edges)
    own = (x[:, 37:237] for x in tensors)
    alone, state = chunk_scan(*own, output_final_state=True)
    assert torch.equal(o[:, 37:237], alone)
    assert torch.equal(states[1:2], state)


@pytest.mark.parametrize("T", [0, 1, 15, 63, 65, 200, 300])
def test_lengths(T, large, calls):
    check(Case("scalar", 7, 9, T, dtype=BF16, v_first=True))
    check(Case("none", 16, 32, T, H=3, HK=1, dtype=FP16, with_state=False))
    check(Case("vector", 7, 9, T, dtype=BF16, v_first=True))
    check(Case("vector", 16, 32, T, H=3, HK=1, dtype=FP16, with_state=False))
    assert calls == [T] * 4 * (T > 0)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("K", "V"), [(1, 1), (8, 16), (20, 33), (32, 64), (60, 100), (64, 130), (100, 7)]
)
@pytest.mark.parametrize("decay", TOKEN_DECAYS)
def test_head_dims(decay, K, V, dtype, large):
    check(Case(decay, K, V, 150, H=2, HK=1, dtype=dtype, v_first=dtype is BF16))


@pytest.mark.parametrize("K", [65, 128, 200, 260, 520])
def test_head_dims_by_shared_memory(K, gpu):
    """States of K up to 512 are in registers where a CTA has enough shared memory."""
    check(Case("scalar", K, 72, 140, H=1, HK=1, dtype=BF16))


@pytest.mark.parametrize(
    ("K", "dtype"), [(65, FP16), (128, BF16), (128, FP16), (200, BF16), (256, FP16)]
)
def test_vectors_of_large_k(K, dtype, large, calls):
    check(Case("vector", K, 72, 70, H=1, HK=1, dtype=dtype))
    assert calls == [70]


@pytest.mark.parametrize("K", [257, 520])
def test_vectors_in_tiles_of_k(large, calls, K):
    check(Case("vector", K, 8, 20, H=1, HK=1, dtype=BF16, v_first=True))
    assert len(calls) == -(-K // 256)


@pytest.mark.parametrize(
    ("K", "V", "segment"),
    [(7, 40, 1024), (32, 66, 1024), (60, 130, 1024), (128, 24, 1024), (200, 7, 4096)],
)
@pytest.mark.parametrize("decay", TOKEN_DECAYS)
def test_segments(decay, K, V, segment, large):
    """Sequences that are longer than a segment of WalkTiling, packed too; two heads in a CTA."""
    if K > 128 and decay == "vector":
        segment //= 2
    T = segment * (2 if K < 100 else 1) + 70
    check(Case(decay, K, V, T, H=1, HK=1, dtype=BF16, v_first=True))
    edges = (3, 3, segment + 3, segment + 4, T - 4, T - 4)
    check(Case(decay, K, 9, T, H=3 if K < 16 else 1, HK=1, cu_seqlens=edges, dtype=FP16))


def test_a_state_that_reaches_the_last_segment(large):
    """Gates so small that what the scan multiplies by is not 0, which other tests cannot see."""
    case = Case("vector", 24, 24, 2200, -1e-3, H=1, HK=1, dtype=BF16)
    inputs = case.inputs()
    inputs["g"] = -1e-3 * torch.rand(inputs["g"].shape).double()
    inputs["v"] *= 2.0**-6  # the initial state is large beside what comes later
    check_results(case, "cpu", inputs)


@pytest.mark.parametrize("edges", [[-5, 400, 200], [250, 300, 0, 300], [0, 2**31 - 1, -(2**31)]])
@pytest.mark.parametrize("decay", TOKEN_DECAYS)
def test_lengths_that_lie(decay, edges, large):
    """Nothing is read or written outside of the tensors."""
    inputs = Case(decay, 16, 24, 300, dtype=BF16).inputs()
    q, k, v = (inputs[name].bfloat16() for name in "qkv")
    seqlens = torch.tensor(edges, dtype=torch.int32)
    chunk_scan(q, k, v, inputs["g"].float(), cu_seqlens=seqlens, output_final_state=True)


@pytest.mark.parametrize("gate", GATES)
def test_gates(gate, large):
    for decay, K in (("scalar", 16), ("head", 40), ("vector", 16), ("vector", 100)):
        case = Case(decay, K, 24, 200, gate, dtype=BF16)
        check_results(case, "cpu", case.inputs())


@pytest.mark.parametrize("gate", [-0.05, -2.0, -4.0, -5.0, -7.0, -104.0, -torch.inf])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_vectors_that_are_strong_at_every_token(gate, dtype, large):
    """Below -69 in 16 tokens A is not made on tensor cores."""
    for K in (16, 40):
        case = Case("vector", K, 24, 70, dtype=dtype)
        inputs = case.inputs()
        g = torch.full_like(inputs["g"], gate)
        inputs["g"] = g
        check_results(case, "cpu", inputs)
        g[:, ::3, :, : K // 2] = -0.01
        g[:, 7:23] = -0.3  # other steps and columns are not
        check_results(case, "cpu", inputs)


@pytest.mark.parametrize("K", [16, 130])
@pytest.mark.parametrize("decay", TOKEN_DECAYS)
def test_packed_sequences(decay, K, large):
    for edges in (
        packed(300),
        (5, 5, 133, 134, 134, 262),
        (0, 128, 256, 300),
        (300, 300),
        (290, 300),
    ):
        check(Case(decay, K, 8, 300, H=1, HK=1, cu_seqlens=edges, dtype=BF16))


def test_several_heads_of_a_block(large):
    check(Case("scalar", 8, 16, 140, B=2, H=6, HK=3, dtype=BF16))
    check(Case("vector", 8, 16, 140, B=2, H=3, HK=3, dtype=BF16))
    check(Case("head", 30, 40, 40, B=2, H=3, HK=3, dtype=FP16))


@pytest.mark.parametrize("K", [0, 20, 24, 256])  # 0: a scalar gate
@pytest.mark.parametrize("strong", [False, True])
def test_gates_of_q_dtype_and_strides(K, strong, large):
    of_q = K or 24
    made = torch.randn(2, 2, 70, 3 * of_q).bfloat16()
    q, k, v = (x.transpose(1, 2) for x in made.split(of_q, -1))
    g = -torch.rand(2, 70, 2, *(K,) * (K > 0)).bfloat16()
    g[:, 20:60] *= 50 if strong else 1
    got, _ = chunk_scan(q, k, v, g)
    same, _ = chunk_scan(q.contiguous(), k.contiguous(), v.contiguous(), g.float())
    assert torch.equal(got, same)


def cancelling(case: Case) -> dict[str, Tensor | None]:
    """Terms of the state that cancel but for a thousandth."""
    inputs = case.inputs()
    assert inputs["g"] is not None
    inputs["g"] = torch.full_like(inputs["g"], -0.01)
    for name in "kv":
        inputs[name] = inputs[name].abs().bfloat16().double()
    signs = 1 - 2 * (torch.arange(case.T) % 2)
    inputs["v"] = inputs["v"] * signs[:, None, None]
    return inputs


def large_numbers(case: Case) -> dict[str, Tensor | None]:
    """A state beyond 65504, which q brings back to what fp16 can hold."""
    inputs = case.inputs()
    for name in "kv":
        inputs[name] = (30 + 2 * inputs[name]).half().double()
    inputs["q"] = (inputs["q"] * 2.0**-6).half().double()
    return inputs


@pytest.mark.parametrize("make", [cancelling, large_numbers])
@pytest.mark.parametrize("K", [1, 24])
@pytest.mark.parametrize("decay", TOKEN_DECAYS)
def test_contents(decay, K, make: Callable, large):
    dtype = FP16 if make is large_numbers else BF16
    if make is large_numbers and decay == "scalar":
        decay = "none"
    case = Case(decay, K, K, 300, H=1, HK=1, dtype=dtype)
    inputs = make(case)
    if make is large_numbers:
        if decay == "vector":
            inputs["g"] = torch.zeros_like(inputs["g"])
        state = torch.einsum("bthk,bthv->hkv", inputs["k"][:, :256], inputs["v"][:, :256])
        assert state.max() > 2 * 65504
    check_results(case, "cpu", inputs, random_signs=make is cancelling)


def test_a_query_of_fp16_keeps_its_digits_beside_its_decays(large):
    """Of outputs that are one term: k is rounded to fp16, the state to bf16, and nothing else."""
    case = Case("vector", 1, 64, 64, H=1, HK=1, dtype=FP16, with_state=False)
    inputs = case.inputs()
    inputs["v"][:, 1:] = 0.0
    inputs["g"] = -0.02 * torch.rand(inputs["g"].shape).double()
    q, k, v = (inputs[name].to(FP16) for name in "qkv")
    o, _ = chunk_scan(q, k, v, inputs["g"].float())
    want, _ = recurrence(*(inputs[name] for name in ("q", "k", "v", "g")), 1.0)
    share = (o - want).abs() / ((2 * 2.0**-11 + 2.0**-8) * want.abs() + 2.0**-24)
    assert share.max() <= 1
    assert share[:, 16:].max() > 0.5  # of 3,072 outputs one is rounded as much as that


@pytest.mark.parametrize("decay", TOKEN_DECAYS)
def test_neighbours_change_no_bit(decay, large):
    q, k = (torch.randn(1, 300, 1, 24).half() for _ in range(2))
    v, g = torch.randn(1, 300, 1, 40).half(), -torch.rand(1, 300, 1)
    if decay == "vector":
        g = -3 * torch.rand(1, 300, 1, 24) * (torch.rand(1, 300, 1, 1) + 1)
    check_a_sequence_alone(q, k, v, g)


def test_other_heads_and_runs_change_no_bit(large):
    """Heads of a CTA: one with gates that are strong, beside one without."""
    q, k, v = (torch.randn(1, 150, 3, 16).half() for _ in range(3))
    g = -torch.rand(1, 150, 3, 16)
    g[:, :, 1] *= 30
    o, states = chunk_scan(q, k, v, g, output_final_state=True)
    again, _ = chunk_scan(q, k, v, g)
    assert torch.equal(o, again)
    for head in range(3):
        own = (x[:, :, head : head + 1] for x in (q, k, v, g))
        alone, state = chunk_scan(*own, output_final_state=True)
        assert torch.equal(o[:, :, head : head + 1], alone)
        assert torch.equal(states[:, head : head + 1], state)
