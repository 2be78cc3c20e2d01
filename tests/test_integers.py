"""A window, a length or a number of splits is any integer, whatever type it comes in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from bad_input import CALLS, HALF, dense, varlen
from compare import assert_bitwise
from torch.fx.experimental.proxy_tensor import make_fx

import flash_attn
from flash_attn import flash_attn_func, flash_attn_with_kvcache

PAIRS = {
    "list": lambda left, right: [left, right],
    "numpy integers": lambda left, right: (np.int64(left), np.int32(right)),
    "array": lambda left, right: np.array([left, right]),
    "tensor": lambda left, right: torch.tensor([left, right]),
    "int32 tensor": lambda left, right: torch.tensor([left, right], dtype=torch.int32),
    "tensors": lambda left, right: (torch.tensor(left), torch.tensor(right)),
}
NUMBERS = {"numpy": np.int64, "numpy, 16 bits": np.int16, "tensor": torch.tensor}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("call", CALLS)
def test_windows(device, needs, call, pair):
    function, make = CALLS[call]
    arguments = make(device)
    with needs(*(["kvcache"] if call == "cache" else [])):
        expected = function(**arguments, window_size=(3, 1))
        out = function(**arguments, window_size=PAIRS[pair](3, 1))
        assert_bitwise("out", out, expected)


def test_a_window_on_the_gpu(cuda):
    arguments = dense(cuda)
    expected = flash_attn_func(**arguments, window_size=(3, 1))
    out = flash_attn_func(**arguments, window_size=torch.tensor([3, 1], device=cuda))
    assert_bitwise("out", out, expected)


def test_windows_of_the_private_functions(device):
    arguments = dense(device)
    plain = (0.0, 0.2, False)
    scores = (0.0, None, False)
    interface = flash_attn.flash_attn_interface
    expected = interface._flash_attn_forward(*arguments.values(), *plain, 3, 1, *scores)[0]
    out = interface._flash_attn_forward(
        *arguments.values(), *plain, torch.tensor(3), np.int64(1), *scores
    )[0]
    assert_bitwise("out", out, expected)
    with pytest.raises(ValueError, match=r"window_size: got .*64 bits"):
        interface._flash_attn_forward(*arguments.values(), *plain, 2**63, 0, *scores)


@pytest.mark.parametrize("sides", [(2**63 - 1, 2**63 - 1), (-(2**63), -(2**63)), (2**40, 2**31)])
def test_a_window_wider_than_all_keys(device, sides):
    arguments = dense(device)
    assert_bitwise(
        "out", flash_attn_func(**arguments, window_size=sides), flash_attn_func(**arguments)
    )


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", ["cache_seqlens", "num_splits"])
def test_numbers_of_a_cache(device, needs, name, number):
    function, make = CALLS["cache"]
    with needs("kvcache"):
        expected = function(**seeded(make, device) | {name: 5})
        out = function(**seeded(make, device) | {name: NUMBERS[number](5)})
        assert_bitwise("out", out, expected)


def seeded(make: Callable[[str], dict], device: str) -> dict:
    """The same tensors every time: an append writes into them."""
    torch.manual_seed(1)
    return make(device)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_longest_sequence(device, number):
    function, _ = CALLS["varlen"]
    arguments = varlen(device)
    longest = {f"max_seqlen_{x}": NUMBERS[number](8) for x in "qk"}
    assert_bitwise("out", function(**arguments | longest), function(**arguments))


def test_symbolic_integers():
    """A graph traced with symbolic shapes serves windows and lengths that follow from them."""

    def call(q, cache):
        window = flash_attn_func(q, q, q, window_size=(q.shape[1] // 2, q.shape[1] // 4))
        cached = flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=q.shape[1], num_splits=q.shape[1] // 2
        )
        return window + cached

    def inputs(seqlen: int):
        return (torch.randn(2, n, 4, 32, dtype=HALF) for n in (seqlen, 40))

    traced = make_fx(call, tracing_mode="symbolic")(*inputs(12))
    for seqlen in (12, 20):
        arguments = tuple(inputs(seqlen))
        assert_bitwise("out", traced(*arguments), call(*arguments))


def test_symbolic_windows_in_a_compiled_graph():
    def call(q):
        return flash_attn_func(q, q, q, window_size=[q.shape[1] // 2, 0])

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for seqlen in (12, 20):
        q = torch.randn(2, seqlen, 4, 32, dtype=HALF)
        assert_bitwise("out", compiled(q), call(q))
