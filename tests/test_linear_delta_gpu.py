"""What of the gated delta rule only a GPU shows: its kernels run, at sizes beyond the host's."""

from __future__ import annotations

import functools

import pytest
import torch

from flash_attn.linear import (
    _delta_step,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_step,
)
from tests.linear.delta_rounding import Case, check
from tests.linear.launches import check_graph_of_lengths, check_one_kernel_and_graph, launched
from tests.linear.steps import check_neighbours, drawn

BF16, FP16 = torch.bfloat16, torch.float16
EDGES = (0, 0, 130, 131, 131, 389, 390)
NAMES = ("q", "k", "v", "g", "beta")


def prompt(cuda: str, case: Case) -> list[torch.Tensor]:
    """q, k, v, g and beta"""
    exact = case.inputs()
    return [exact[n].to(cuda, case.dtype if n in "qkv" else torch.float32) for n in NAMES]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("K", "V"), [(1, 1), (7, 9), (16, 32), (64, 64), (100, 130), (128, 128), (200, 40), (256, 72)]
)
def test_results(K, V, dtype, cuda):
    check(Case(K, V, 300, B=2, H=1, HV=2, dtype=dtype, v_first=True), cuda)
    check(Case(K, V, 390, H=2, HV=2, cu_seqlens=EDGES, dtype=dtype, with_state=False), cuda)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("K", [64, 128, 256])
def test_blocks_enough_for_all_multiprocessors(K, dtype, cuda):
    """Then each has 64 columns of V, and one sequence's blocks 32: no bit may differ."""
    given = prompt(cuda, Case(K, 128, 200, B=16, H=8, HV=32, dtype=dtype))
    all_of, state = chunk_gated_delta_rule(*given, output_final_state=True)
    for b in (0, 15):
        o, final = chunk_gated_delta_rule(*(x[b : b + 1] for x in given), output_final_state=True)
        assert torch.equal(o, all_of[b : b + 1])
        assert torch.equal(final, state[b : b + 1])


@pytest.mark.parametrize("K", [64, 256])
def test_the_walk_waits_for_the_factors(K, cuda):
    """It starts before their launch ends, whose last blocks are the walk's last chunks."""
    given = prompt(cuda, Case(K, 64, 20000, H=4, HV=8))
    want = chunk_gated_delta_rule(*given)[0]
    for _ in range(50):
        assert torch.equal(chunk_gated_delta_rule(*given)[0], want)


@pytest.mark.parametrize("gate", [0.0, -1e-3, -5.0, -50.0, -torch.inf])
@pytest.mark.parametrize("T", [1, 15, 63, 65, 300])
def test_gates(T, gate, cuda):
    check(Case(64, 96, T, gate), cuda)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_keys_that_are_alike(dtype, cuda):
    check(Case(128, 64, 300, 0.0, dtype=dtype, alike=3.0), cuda)
    check(Case(128, 64, 300, 0.0, dtype=dtype, alike=1.0, most_beta=2.0), cuda)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("K", [7, 64, 128, 256])
def test_norms(K, dtype, cuda):
    check(Case(K, 72, 300, H=2, HV=4, dtype=dtype, normalizes=True), cuda)


@pytest.mark.parametrize("K", [64, 128, 256])
def test_a_prompt_is_two_kernels_and_repeats_to_the_bit(K, cuda):
    given = prompt(cuda, Case(K, 128, 1000, B=4, H=2, HV=4))
    names = launched(lambda: chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True))
    assert sum("delta_factors_kernel" in name for name in names) == 1
    assert sum("delta_walk_kernel" in name for name in names) == 1
    assert not any("elementwise" in name or "reduce" in name for name in names)
    first, _ = chunk_gated_delta_rule(*given)
    for _ in range(3):
        assert torch.equal(first, chunk_gated_delta_rule(*given)[0])
    alone, _ = chunk_gated_delta_rule(*(x[1:2] for x in given))
    assert torch.equal(first[1:2], alone)


def test_captured_with_lengths_that_change(cuda):
    q, k, v, g, beta = prompt(cuda, Case(64, 64, 300, dtype=FP16))
    edges = torch.tensor([0, 40, 300], dtype=torch.int32, device=cuda)
    arguments = q, k, v, g, beta, None, edges, 0.2, False, True, False
    check_graph_of_lengths(torch.ops.flash_attn.delta_forward, arguments, edges)


def test_lengths_that_lie(cuda):
    """Nothing is read or written outside of the tensors, whatever cu_seqlens holds."""
    q, k, v, g, beta = prompt(cuda, Case(64, 64, 300))
    for edges in ([-5, 400, 200], [300, 0, 300], [0, 2**31 - 1, -(2**31)]):
        seqlens = torch.tensor(edges, dtype=torch.int32, device=cuda)
        chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=seqlens)
    torch.cuda.synchronize()


def a_step(cuda: str, rows: int, K: int, V: int, dtype: torch.dtype, v_first: bool) -> list:
    """q, k, v, g, beta, states of twice as many slots, and the rows' slots."""
    *given, state, slots = drawn(cuda, rows, K, V, dtype, v_first)
    return [*given, torch.randn(rows, 16, device=cuda), state, slots]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize(
    ("K", "V"), [(1, 1), (7, 9), (16, 32), (60, 100), (128, 64), (128, 128), (256, 320), (255, 8)]
)
@pytest.mark.parametrize("rows", [1, 37])
def test_step(rows, K, V, dtype, v_first, cuda):
    q, k, v, g, beta, state, slots = a_step(cuda, rows, K, V, dtype, v_first)
    slots[rows // 2 + 1 :: 3] = -1
    for gate, of, sigmoid in (
        (None, None, 0.0),
        (g, beta, 1.0),
        (g.to(dtype), beta.to(dtype), 2.0),
    ):
        other = state.double()
        o = recurrent_gated_delta_rule_step(
            q, k, v, gate, of, state, slots, 0.3, True, sigmoid > 0, sigmoid == 2, v_first
        )
        given = [x.double() for x in (q, k, v)]
        given += [None if x is None else x.double() for x in (gate, of)]
        cache = other.mT if v_first else other
        want = _delta_step.step(*given, cache, slots, 0.3, True, sigmoid)
        torch.testing.assert_close(state.double(), other, rtol=1e-5, atol=1e-5)
        error = {BF16: 1e-2, FP16: 2e-3, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(o.double(), want, rtol=error, atol=error)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(16, 32), (128, 128), (256, 48), (33, 7)])
def test_a_step_has_the_same_bits_in_any_batch(K, V, v_first, cuda):
    *given, state, slots = a_step(cuda, 64, K, V, BF16, v_first)
    step = functools.partial(recurrent_gated_delta_rule_step, state_v_first=v_first)
    check_neighbours(step, given, state, slots, row=5)


def test_a_step_is_one_kernel_and_captured(cuda):
    *given, state, slots = a_step(cuda, 8, 64, 128, BF16, False)
    step = torch.ops.flash_attn.delta_step
    check_one_kernel_and_graph(step, "delta_step_kernel", given, state, slots, 0.3, True, 1.0)


def test_steps_continue_a_prompt(cuda):
    """A prompt, and its tokens one by one from its state, are the prompt with these tokens."""
    given = prompt(cuda, Case(128, 128, 90, B=2, H=2, HV=4, dtype=FP16))
    want, want_final = chunk_gated_delta_rule(*given, output_final_state=True)
    _, state = chunk_gated_delta_rule(*(x[:, :70] for x in given), output_final_state=True)
    for t in range(70, 90):
        token = [x[:, t : t + 1] for x in given]
        o, state = fused_recurrent_gated_delta_rule(
            *token, initial_state=state, output_final_state=True
        )
        torch.testing.assert_close(o, want[:, t : t + 1], rtol=1e-2, atol=4e-3)
    torch.testing.assert_close(state, want_final, rtol=1e-2, atol=1e-2)
