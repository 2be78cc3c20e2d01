"""What of linear attention only a GPU shows: its kernels run, at sizes too large for the host."""

from __future__ import annotations

import os

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flash_attn.linear import (
    _kernels,
    _step,
    chunk_gla,
    chunk_retention,
    chunk_scan,
    chunk_simple_gla,
    recurrent_step,
)
from tests.linear.cases import Backend, Case, check
from tests.linear.launches import check_graph_of_lengths, check_one_kernel_and_graph, launched
from tests.linear.rounding import check_results
from tests.linear.steps import check_neighbours, drawn

BF16, FP16 = torch.bfloat16, torch.float16
EDGES = (0, 0, 130, 131, 131, 899, 900)


def inputs(cuda: str, *shape: int) -> list[torch.Tensor]:
    """q, k, v of shape [B, T, H, D] in bf16."""
    return [torch.randn(shape, device=cuda).bfloat16() for _ in range(3)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("decay", ["none", "head", "scalar", "vector"])
@pytest.mark.parametrize(
    ("K", "V"),
    [(1, 1), (7, 9), (8, 16), (16, 32), (32, 64), (60, 100), (64, 128), (128, 256), (256, 130),
     (320, 130)],
)  # fmt: skip
def test_results(K, V, decay, dtype, cuda):
    for case in (
        Case(decay, K, V, 700, B=2, H=3, HK=1, dtype=dtype, v_first=True),
        Case(decay, K, V, 900, H=4, HK=2, cu_seqlens=EDGES, dtype=dtype, with_state=False),
    ):
        check_results(case, cuda, case.inputs())


@pytest.mark.parametrize("gate", [0.0, -1e-3, -5.0, -50.0, -torch.inf])
@pytest.mark.parametrize("T", [1, 15, 63, 65, 300])
@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_gates(decay, T, gate, cuda):
    case = Case(decay, 64, 128, T, gate, dtype=BF16)
    check_results(case, cuda, case.inputs())


@pytest.mark.parametrize("gate", [-0.05, -4.0, -5.0, -7.0, -104.0, -torch.inf])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("K", [16, 40, 128, 256])
def test_vectors_that_are_strong_at_every_token(K, gate, dtype, cuda):
    """Below -69 in 16 tokens A is not made on tensor cores."""
    case = Case("vector", K, 48, 200, dtype=dtype)
    inputs = case.inputs()
    inputs["g"] = torch.full_like(inputs["g"], gate)
    check_results(case, cuda, inputs)
    inputs["g"][:, ::3, :, : K // 2] = -0.01
    inputs["g"][:, 7:23] = -0.3  # other steps and columns are not
    check_results(case, cuda, inputs)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("K", [16, 64, 128, 256, 300])
def test_segments(K, decay, cuda):
    """A small gate at each token: the state reaches from one segment to the next."""
    q, k, v = (torch.randn(1, 9000, 2, d, device=cuda).bfloat16() for d in (K, K, 72))
    g = torch.randn(1, 9000, 2, *((K,) if decay == "vector" else ()), device=cuda).abs() * -2e-3
    edges = torch.tensor([0, 2500, 2501, 9000], dtype=torch.int32, device=cuda)
    want = chunk_scan(q.float(), k.float(), v.float(), g, output_final_state=True, cu_seqlens=edges)
    got = chunk_scan(q, k, v, g, output_final_state=True, cu_seqlens=edges)
    for x, y in zip(got, want, strict=True):
        assert (x.float() - y).norm() < 8e-3 * y.norm()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("decay", ["none", "head", "scalar", "vector"])
def test_gradients(decay, dtype, cuda):
    backend = Backend(cuda, kernels=True)
    check(Case(decay, 32, 64, 200, B=2, H=4, HK=2, dtype=dtype), backend)
    check(Case(decay, 100, 60, 200, cu_seqlens=(0, 70, 70, 200), dtype=dtype), backend)


@pytest.mark.parametrize("K", [16, 64, 256])
def test_calls_run_our_kernels(K, cuda):
    q, k, v = inputs(cuda, 1, 300, 2, K)
    g = -torch.rand(1, 300, 2, device=cuda)
    vectors = g[..., None].expand(1, 300, 2, K)
    for call in (
        lambda: chunk_simple_gla(q, k, v, g),
        lambda: chunk_retention(q, k, v),
        lambda: chunk_scan(q, k, v),
        lambda: chunk_gla(q, k, v, vectors),
    ):
        names = " ".join(launched(call))
        # Of one segment: nothing comes before.
        assert "linear::walk_outputs_kernel" in names or "linear::vector_outputs_kernel" in names
        assert "gemm" not in names
    on_hopper = (
        torch.cuda.get_device_capability(cuda) == (9, 0)
        and os.environ.get("FLASH_ATTN_ARCH") != "80"
    )
    assert ("WarpgroupConfig" in names) == (on_hopper and K > 16)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("K", "V"), [(16, 32), (32, 64), (64, 128), (128, 256), (256, 512)])
def test_gradients_of_several_chunks(K, V, dtype, decay, cuda):
    """Beside fp32 on torch operations, from the same 16-bit inputs; several segments up to K 128.
    A small gate at each token: the state reaches from one segment to the next."""
    T = 2500 if decay == "vector" else 600
    given = [torch.randn(1, T, 2, d, device=cuda).to(dtype) for d in (K, K, V)]
    gates = (1, T, 2, K) if decay == "vector" else (1, T, 2)
    given += [-60 / T * torch.rand(gates, device=cuda), torch.randn(1, 2, K, V, device=cuda)]
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[4])
    found = []
    for own in (given, [x.float() for x in given]):
        xs = [x.detach().requires_grad_() for x in own]
        o, state = chunk_scan(*xs[:4], initial_state=xs[4], output_final_state=True)
        found.append(torch.autograd.grad([o, state], xs, [do.to(o), dstate]))
    for got, want in zip(*found, strict=True):
        assert (got.float() - want).norm() < 8e-3 * want.norm()


@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("K", [16, 64, 256])
def test_a_backward_runs_our_kernels(K, decay, cuda):
    q, k, v = (x.requires_grad_() for x in inputs(cuda, 1, 300, 2, K))
    gates = (1, 300, 2, K) if decay == "vector" else (1, 300, 2)
    g = (-torch.rand(gates, device=cuda)).requires_grad_()
    o, _ = chunk_scan(q, k, v, g)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        torch.autograd.grad(o, [q, k, v, g], torch.randn_like(o))
        torch.cuda.synchronize()
    names = " ".join(event.name for event in profiled.events())
    kernel = "vector_gradients_kernel" if decay == "vector" else "gradients_kernel"
    assert f"linear::{kernel}" in names
    assert "gemm" not in names


@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_gradients_repeat_and_do_not_depend_on_neighbours(decay, cuda):
    gates = (1, 3000, 4, 64) if decay == "vector" else (1, 3000, 4)
    given = [*inputs(cuda, 1, 3000, 4, 64), -0.1 * torch.rand(gates, device=cuda)]
    do = torch.randn_like(given[2])
    edges = torch.tensor([0, 1000, 2501, 3000], dtype=torch.int32, device=cuda)

    def gradients(begin: int, end: int, cu_seqlens: torch.Tensor | None) -> tuple:
        own = [x[:, begin:end].detach().requires_grad_() for x in given]
        o, _ = chunk_scan(*own, cu_seqlens=cu_seqlens)
        return torch.autograd.grad(o, own, do[:, begin:end])

    first, again = (gradients(0, 3000, edges) for _ in range(2))
    for x, same, alone in zip(first, again, gradients(1000, 2501, None), strict=True):
        assert torch.equal(x, same)
        assert torch.equal(x[:, 1000:2501], alone)


@pytest.mark.parametrize(("K", "columns"), [(16, 256), (257, 256), (600, 256)])
def test_vectors_in_tiles_of_k(K, columns, cuda):
    q, v = (torch.empty(1, 100, 2, d, device=cuda, dtype=BF16) for d in (K, 24))
    g = torch.empty(1, 100, 2, K, device=cuda)
    for operation in ("_linear_forward", "_linear_backward"):
        assert _kernels.serves(operation, q, v, g)
        assert _kernels.most_columns(operation, q, v, g) == columns
    check(Case("vector", K, 24, 100, dtype=BF16), Backend(cuda, kernels=True))


@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_repeatable_and_independent_of_neighbours(decay, cuda):
    q, k, v = inputs(cuda, 1, 5000, 4, 64)
    g = -0.1 * torch.rand(1, 5000, 4, *((64,) if decay == "vector" else ()), device=cuda)
    edges = torch.tensor([0, 1000, 4001, 5000], dtype=torch.int32, device=cuda)
    first, again = (chunk_scan(q, k, v, g, cu_seqlens=edges)[0] for _ in range(2))
    assert torch.equal(first, again)
    alone, _ = chunk_scan(*(x[:, 1000:4001] for x in (q, k, v, g)))
    assert torch.equal(first[:, 1000:4001], alone)


def test_one_long_sequence(cuda):
    """64k tokens: the end depends on all of them."""
    q, k, v = inputs(cuda, 1, 65536, 1, 32)
    o, state = chunk_scan(q, k, v, output_final_state=True)
    want = torch.einsum("thk,thv->hkv", k[0].double(), v[0].double())
    assert (state[0] - want).norm() < 1e-5 * want.norm()
    last = torch.einsum("hk,hkv->hv", q[0, -1].double(), want) * 32**-0.5
    assert (o[0, -1] - last).norm() < 1e-2 * last.norm()


def test_graph(cuda):
    """No call waits for the GPU: packed ones are captured too, and read offsets at each replay."""
    q, k, v = inputs(cuda, 1, 400, 2, 32)
    g = -torch.rand(1, 400, 2, device=cuda)
    edges = torch.tensor([0, 100, 400], dtype=torch.int32, device=cuda)
    arguments = q, k, v, g, None, edges, 0.2, True, False
    check_graph_of_lengths(torch.ops.flash_attn.linear_forward, arguments, edges)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize(
    ("K", "V"), [(1, 1), (7, 9), (16, 32), (60, 100), (128, 64), (128, 128), (512, 320), (1100, 8)]
)
@pytest.mark.parametrize("rows", [1, 37])
def test_step(rows, K, V, dtype, v_first, cuda):
    q, k, v, g, state, slots = drawn(cuda, rows, K, V, dtype, v_first, K)
    slots[rows // 2 + 1 :: 3] = -1
    for gate in (None, g[0, :, 0].contiguous(), g[..., 0].contiguous(), g, g.to(dtype)):
        other = state.double()
        o = recurrent_step(q, k, v, gate, state, slots, 0.3, v_first)
        given = [x.double() for x in (q, k, v)]
        of_gate = None if gate is None else gate.double()
        want = _step.step(*given, of_gate, other.mT if v_first else other, slots, 0.3)
        torch.testing.assert_close(state.double(), other, rtol=1e-5, atol=1e-5)
        error = {BF16: 1e-2, FP16: 2e-3, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(o.double(), want, rtol=error, atol=error * K**0.5)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(16, 32), (128, 128), (300, 48), (33, 7)])
def test_a_step_has_the_same_bits_in_any_batch(K, V, v_first, cuda):
    *given, state, slots = drawn(cuda, 64, K, V, BF16, v_first, K)
    check_neighbours(lambda *args: recurrent_step(*args, 0.3, v_first), given, state, slots, row=5)


def test_a_step_is_one_kernel_and_captured(cuda):
    *given, state, slots = drawn(cuda, 8, 64, 128, BF16, False, 64)
    step = torch.ops.flash_attn.linear_step
    check_one_kernel_and_graph(step, "step_kernel", given, state, slots, 0.3)
