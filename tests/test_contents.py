"""What index tensors contain: looked at on a CPU always, on a GPU with FLASH_ATTN_CHECK=1."""

from __future__ import annotations

import sys

import pytest
import torch
from bad_contents import CASES, both, lengths, one_new_key, pages
from bad_input import CALLS, HALF, cache, int32, varlen
from compare import assert_bitwise

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
from tests.commands import run


def raises(bad, device: str) -> None:
    (call,) = bad.calls
    function, make = CALLS[call]
    arguments = make(device)
    arguments |= bad.change(arguments)
    before = {name: x.clone() for name, x in arguments.items() if name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError) as raised:
        function(**arguments)
    for words in bad.says:
        assert words in str(raised.value)
    for name, x in before.items():
        assert_bitwise(name, arguments[name], x)


BAD = pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name.replace(" ", "_"))


@BAD
def test_message(device, checking, bad):
    raises(bad, device)


@BAD
def test_message_of_the_cpu(bad):
    """Without FLASH_ATTN_CHECK."""
    raises(bad, "cpu")


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("leftpad_k", (0, -1), r"leftpad_k\[1\]: got -1"),
        ("leftpad_k", (4, 9), r"leftpad_k\[1\]: got 9; at most 8 is needed, the keys of"),
        ("seqused_k", (4, 9), "seqused_k: got 9 keys for sequence 1; at most 8"),
    ],
)
def test_private_arguments(device, checking, name, values, says):
    q, k, v, *lengths = varlen(device).values()
    with pytest.raises(ValueError, match=says):
        _flash_attn_varlen_forward(
            q, k, v, *lengths, 0.0, 0.2, False, **{name: int32(device, *values)}
        )


def test_the_backward_looks_too(device, needs, checking):
    q, k, v, ends, _, *longest = varlen(device).values()
    with needs("backward"):
        out, lse, *_ = _flash_attn_varlen_forward(q, k, v, ends, ends, *longest, 0.0, 0.2, False)
        bad = int32(device, 0, 8, 4)
        with pytest.raises(ValueError, match=r"cu_seqlens_k\[2\]: got 4 after 8"):
            _flash_attn_varlen_backward(
                out, q, k, v, out, lse, *(torch.empty_like(x) for x in (q, k, v)), ends, bad,
                *longest, 0.0, 0.2, False, -1, -1, 0.0, None, False,
            )  # fmt: skip


GOOD = {
    "read one row of the cache twice": lambda c: {
        "k": None,
        "v": None,
        "cache_batch_idx": int32(c["q"].device, 1, 1),
    },
    "skip a row that another one has": both(
        lambda c: {"cache_batch_idx": int32(c["q"].device, 1, 1)}, lengths(-1, 3)
    ),
    "share full pages": both(one_new_key, pages((0, 1), (0, 2)), lengths(5, 5)),
    "skip a sequence on a shared page": both(one_new_key, pages((0, 1), (0, 1)), lengths(5, -1)),
    "pad an empty slot": both(
        lambda c: {"cache_leftpad": int32(c["q"].device, 0, 16)}, lengths(3, -1)
    ),
    "nothing but padding": both(
        lambda c: {"cache_leftpad": int32(c["q"].device, 0, 9)}, lengths(3, 3)
    ),
    "write to no page": both(one_new_key, pages((0, -1), (0, -1)), lengths(5, 5)),
    "share padding": both(
        one_new_key,
        pages((2, 1), (0, 2)),
        lengths(5, 5),
        lambda c: {"cache_leftpad": int32(c["q"].device, 4, 0)},
    ),
}


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_good_contents(device, needs, checking, change):
    arguments = cache(device)
    arguments |= change(arguments)
    with needs("kvcache"):
        assert flash_attn_with_kvcache(**arguments).isfinite().all()


@pytest.mark.parametrize("function", ["forward", "backward"])
def test_a_slice_of_a_packed_batch(device, needs, checking, function):
    """cu_seqlens[2:5] with the whole tensors: other rows are in no sequence and get zeros."""
    ends = [0, 130, 150, 320, 340, 400]
    q, k, v = (torch.randn(400, 2, 32, device=device, dtype=HALF) for _ in range(3))
    outside = [*range(150), *range(340, 400)]
    for x in (q, k, v):
        x[outside] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    some = int32(device, *ends[2:5])
    with needs(*(["backward"] if function == "backward" else [])):
        out, lse = flash_attn_varlen_func(
            *leaves, some, some, 170, 170, causal=True, return_lse=True
        )
        assert not out[outside].any()
        assert torch.isneginf(lse[:, outside]).all()
        inner = [x[150:340] for x in leaves]
        own = int32(device, 0, 170, 190)
        expected = flash_attn_varlen_func(*inner, own, own, 170, 170, causal=True)
        assert_bitwise("out", out[150:340], expected)
        if function == "backward":
            dout = torch.randn_like(out)
            dout[outside] = float("nan")
            grads = torch.autograd.grad(out, leaves, dout)
            expected_grads = torch.autograd.grad(expected, leaves, dout[150:340])
            for name, grad, ref in zip("qkv", grads, expected_grads, strict=True):
                assert not grad[outside].any()
                torch.testing.assert_close(grad, ref, msg=lambda text, n=name: f"d{n}: {text}")


@pytest.mark.parametrize(("value", "registered"), [("1", True), ("0", False), ("", False)])
def test_the_variable(value, registered):
    program = (
        "import torch, flash_attn; print(*(torch._C._dispatch_has_kernel_for_dispatch_key("
        "f'flash_attn::_flash_attn_{name}', 'BackendSelect') for name in "
        "('varlen_forward', 'varlen_backward', 'with_kvcache')))"
    )
    done = run(sys.executable, "-c", program, FLASH_ATTN_CHECK=value)
    assert done.stdout.split() == [str(registered)] * 3


def test_compiled_graphs_are_checked(device, checking):
    """Tracing sees no contents; the graph's calls do."""
    if device == "cpu":
        pytest.skip("the CPU backend looks by itself")
    arguments = varlen(device)
    compiled = torch.compile(flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    compiled(**arguments)
    arguments["cu_seqlens_q"] = int32(device, 0, 8, 4)
    with pytest.raises(ValueError, match="never decrease"):
        compiled(**arguments)


def test_a_graph_is_captured_unchecked(cuda, needs, checking):
    """There is nothing to look at while a graph is captured."""
    arguments = varlen(cuda)
    expected = flash_attn_varlen_func(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_varlen_func(**arguments)
    graph.replay()
    assert_bitwise("out", out, expected)
