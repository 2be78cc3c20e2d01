"""Walks with a vector of decays by Hopper's warpgroups: K above 16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels import library
from tests.kernels.linear_results import poison_forward, poison_gradients
from tests.kernels.test_linear import check_a_sequence_alone, mixed
from tests.linear.cases import GATES, Backend, Case, check, packed
from tests.linear.rounding import check_results

BF16, FP16 = torch.bfloat16, torch.float16
HOST = Backend("cpu", kernels=True)
# A K of each tiling, and one below it, with V of one tile, of two, and of part of one.
HEAD_DIMS = [(17, 40), (32, 66), (60, 128), (64, 130), (100, 24), (128, 200), (200, 7), (256, 70)]


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> Iterator[list[int]]:
    """Tokens of each forward of the kernels, whose results begin as NaN, as gradients' do."""
    poison_gradients(monkeypatch)
    with library.serving(monkeypatch, 90):
        yield poison_forward(monkeypatch, "forward")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("K", "V"), HEAD_DIMS)
def test_head_dims(K, V, dtype, calls):
    case = Case("vector", K, V, 75, H=2, HK=1, dtype=dtype, v_first=dtype is BF16)
    check_results(case, "cpu", mixed(case))
    assert calls == [75]


@pytest.mark.parametrize(("K", "V", "segment"), [(32, 40, 1024), (64, 9, 1024), (200, 24, 2048)])
def test_segments(K, V, segment):
    """Sequences longer than a segment, and packed ones of many lengths."""
    T = segment + 70
    for edges, dtype in ((None, BF16), ((3, 3, segment + 3, segment + 4, T - 4, T - 4), FP16)):
        case = Case("vector", K, V, T, H=1, HK=1, cu_seqlens=edges, dtype=dtype)
        check_results(case, "cpu", mixed(case))


@pytest.mark.parametrize("gate", GATES)
def test_gates(gate):
    for K in (40, 130):
        case = Case("vector", K, 24, 70, gate, dtype=BF16)
        check_results(case, "cpu", case.inputs())


@pytest.mark.parametrize("T", [1, 15, 33, 65])
@pytest.mark.parametrize(("K", "V"), [(32, 24), (60, 130), (128, 40), (200, 72)])
def test_gradients(K, V, T):
    """dV and the gradients of states are walks from the last token to the first."""
    check(Case("vector", K, V, T, H=2, HK=1, dtype=FP16 if T % 2 else BF16), HOST)
    if T == 65:
        check(Case("vector", K, V, T, H=1, HK=1, dtype=BF16, cu_seqlens=packed(T)), HOST)


def test_neighbours_change_no_bit():
    q, k = (torch.randn(1, 300, 1, 60).half() for _ in range(2))
    v, g = torch.randn(1, 300, 1, 40).half(), -3 * torch.rand(1, 300, 1, 60)
    check_a_sequence_alone(q, k, v, g)
