"""The gated delta rule's kernels over chunks against its recurrence in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flash_attn.linear import chunk_gated_delta_rule
from tests.kernels import library
from tests.kernels.linear_results import poison_forward
from tests.linear.cases import GATES, packed
from tests.linear.delta_rounding import Case, check

BF16, FP16 = torch.bfloat16, torch.float16
SMALL_GPU = 120  # 99 KiB of shared memory


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[int]:
    """Tokens of each call of the kernels, whose results begin as NaN."""
    return poison_forward(monkeypatch, "delta_forward")


@pytest.fixture(params=[80, 90, SMALL_GPU])
def gpu(request, monkeypatch) -> Iterator[int]:
    with library.serving(monkeypatch, request.param):
        yield request.param


@pytest.fixture
def large(monkeypatch) -> Iterator[None]:
    with library.serving(monkeypatch, 80):
        yield


@pytest.mark.parametrize("T", [0, 1, 15, 63, 64, 65, 200])
def test_lengths(T, large, calls):
    check(Case(7, 9, T, v_first=True))
    check(Case(16, 40, T, H=2, HV=4, dtype=FP16, with_state=False))
    assert calls == [T] * 2 * (T > 0)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("K", "V"), [(1, 1), (8, 16), (20, 33), (64, 130), (100, 7), (128, 128), (192, 24), (256, 80)]
)
def test_head_dims(K, V, dtype, large, calls):
    check(Case(K, V, 150, HV=1 if K > 64 else 2, dtype=dtype, v_first=dtype is BF16))
    assert calls == [150]


@pytest.mark.parametrize("K", [60, 128, 256])
def test_shared_memory(K, gpu, calls):
    """CTAs of small GPUs have fewer columns of V, or one stage."""
    check(Case(K, 40, 140, HV=1))
    check(Case(K, 72, 140, H=2, HV=4, dtype=FP16))
    assert calls == [140] * 2


def test_no_kernel_has_more_rows(large, calls):
    check(Case(257, 8, 20, HV=1))
    assert not calls


@pytest.mark.parametrize("gate", GATES)
def test_gates(gate, large):
    check(Case(16, 24, 200, gate))
    check(Case(40, 24, 130, gate, dtype=FP16))
    case = Case(16, 24, 100, gate)
    exact = case.inputs()
    exact["g"] = torch.full_like(exact["g"], gate)
    check(case, exact=exact)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_keys_that_are_alike(dtype, large):
    """T has its largest numbers where keys repeat and beta is near 2."""
    check(Case(24, 24, 200, 0.0, dtype=dtype, alike=3.0))
    check(Case(24, 24, 200, 0.0, dtype=dtype, alike=1.0, most_beta=2.0))
    case = Case(16, 16, 130, dtype=dtype)
    exact = case.inputs()
    exact["k"] = torch.zeros_like(exact["k"])
    exact["k"][..., 3] = 1.0
    exact["beta"] = torch.full_like(exact["beta"], 1.875)
    exact["g"] = torch.zeros_like(exact["g"])
    check(case, exact=exact)


@pytest.mark.parametrize("K", [16, 130])
def test_packed_sequences(K, large):
    for edges in (packed(300), (5, 5, 69, 70, 70, 134), (0, 64, 128, 300), (300, 300), (290, 300)):
        check(Case(K, 8, 300, HV=1, cu_seqlens=edges))


@pytest.mark.parametrize("edges", [[-5, 400, 200], [300, 0, 300], [0, 2**31 - 1, -(2**31)]])
def test_lengths_that_lie(edges, large):
    """Nothing is read or written outside of the tensors."""
    seqlens = torch.tensor(edges, dtype=torch.int32)
    chunk_gated_delta_rule(*tensors(300), cu_seqlens=seqlens, output_final_state=True)


def test_a_long_sequence(large):
    check(Case(8, 8, 1200, -1e-3, HV=1))
    check(Case(8, 8, 1200, -5.0, HV=1, dtype=FP16, normalizes=True))


def test_batches_and_shared_heads(large):
    check(Case(8, 16, 140, B=2, H=3, HV=6))
    check(Case(8, 16, 70, B=3, H=2, HV=2, dtype=FP16, with_state=False))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("K", [1, 20, 64, 130])
def test_norms(K, dtype, large):
    check(Case(K, 24, 130, H=2, HV=4, dtype=dtype, normalizes=True))


def test_norms_of_zeros(large):
    case = Case(20, 24, 70, dtype=FP16, normalizes=True)
    exact = case.inputs()
    for name in "qk":
        exact[name][:, ::3] = 0.0
    exact["v"] = (100 * exact["v"]).half().double()
    check(case, exact=exact)


def tensors(T: int, K: int = 24, V: int = 40) -> list[Tensor]:
    """q, k, v, g and beta"""
    exact = Case(K, V, T, dtype=FP16).inputs()
    return [
        exact[n].to(FP16 if n in "qkv" else torch.float32) for n in ("q", "k", "v", "g", "beta")
    ]


def test_neighbours_change_no_bit(large):
    given = tensors(300)
    edges = torch.tensor([0, 37, 237, 300])
    o, states = chunk_gated_delta_rule(*given, output_final_state=True, cu_seqlens=edges)
    own = (x[:, 37:237] for x in given)
    alone, state = chunk_gated_delta_rule(*own, output_final_state=True)
    assert torch.equal(o[:, 37:237], alone)
    assert torch.equal(states[1:2], state)


@pytest.mark.parametrize("K", [24, 200])
def test_plans_change_no_bit(K, monkeypatch):
    """A batch that fills the GPU has wider CTAs than one sequence."""
    given = [torch.cat([x] * 4) for x in tensors(70, K, 60)]
    found = []
    for sm in (80, 90, SMALL_GPU):
        with library.serving(monkeypatch, sm):
            found += [chunk_gated_delta_rule(*given)[0], chunk_gated_delta_rule(*given)[0]]
            found.append(chunk_gated_delta_rule(*(x[:1] for x in given))[0])
    for o in found:
        assert torch.equal(o[:1], found[0][:1])


def test_gates_of_q_dtype_and_strides(large):
    made = torch.randn(2, 2, 70, 3 * 24).bfloat16()
    q, k, v = (x.transpose(1, 2) for x in made.split(24, -1))
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta = -torch.rand(2, 70, 2).bfloat16(), torch.rand(2, 70, 2).bfloat16()
    got, _ = chunk_gated_delta_rule(q, k, v, g, beta)
    same, _ = chunk_gated_delta_rule(*(x.contiguous() for x in (q, k, v)), g.float(), beta.float())
    assert torch.equal(got, same)
    wide, _ = chunk_gated_delta_rule(q, k, v, g.double(), beta.double())
    assert torch.equal(got, wide)


def test_states_that_do_not_lie_well(large):
    given = tensors(70, 24, 40)
    states = torch.randn(1, 2, 24, 80)[..., ::2]
    got = chunk_gated_delta_rule(*given, initial_state=states, output_final_state=True)
    want = chunk_gated_delta_rule(*given, initial_state=states.clone(), output_final_state=True)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_gradients_are_those_of_torch_operations(large, calls):
    """The backward has no kernel and takes nothing of the forward."""
    case = dataclasses.replace(Case(16, 8, 70), with_state=False)
    exact = case.inputs()
    given = [
        exact[n].to(BF16 if n in "qkv" else torch.float32).requires_grad_()
        for n in ("q", "k", "v", "g", "beta")
    ]
    o, _ = chunk_gated_delta_rule(*given)
    got = torch.autograd.grad(o.sum(), given)
    assert calls == [70]
    wide = [x.detach().float().requires_grad_() for x in given]
    o, _ = chunk_gated_delta_rule(*wide)
    for x, y in zip(got, torch.autograd.grad(o.sum(), wide), strict=True):
        torch.testing.assert_close(x.float(), y, rtol=2e-2, atol=2e-2)
    assert calls == [70]
