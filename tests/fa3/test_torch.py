"""torch's own registration of FA3, which finds this distribution by its names.

It refuses all but tensors on a Hopper GPU. Here it serves CPU tensors: all of it runs but that look
at tensors and GPU, which is left in place where a test has the mark of the GPU.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn

from flash_attn import flash_attn_func, flash_attn_varlen_func

_fa3 = pytest.importorskip("torch.nn.attention._fa3", reason="this torch knows no FA3")
HEADS, HEADS_K, HEAD_DIM = 4, 2, 64
VARLEN = inspect.signature(varlen_attn).parameters


class _OnTheCpu(Library):
    def __init__(self, namespace, kind, dispatch_key):
        super().__init__(namespace, kind, "CPU")

    def impl(self, name, function, dispatch_key):
        assert dispatch_key == "CUDA"
        super().impl(name, function, "CPU")


@pytest.fixture(autouse=True)
def _activated(monkeypatch, request):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(_fa3, "Library", _OnTheCpu)
        for look in ("_fa3_forward_support_error", "_fa3_backward_support_error"):
            monkeypatch.setattr(_fa3, look, lambda *arguments: None)
    attention.activate_flash_attention_impl("FA3")
    assert attention.current_flash_attention_impl() == "FA3"
    yield
    attention.restore_flash_attention_impl()


def leaves(*shapes: tuple[int, ...], device: str = "cpu") -> list[Tensor]:
    return [torch.randn(x, device=device).bfloat16().requires_grad_() for x in shapes]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same_gradients(inputs: list[Tensor], out: Tensor, expected: Tensor) -> None:
    dout = torch.randn_like(out)
    for x, y in zip(*(torch.autograd.grad(o, inputs, dout) for o in (out, expected))):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention(causal):
    q, k, v = leaves((2, HEADS, 20, HEAD_DIM), *2 * [(2, HEADS_K, 20, HEAD_DIM)])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    expected, expected_lse = flash_attn_func(*rows, causal=causal, return_lse=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse)
    same_gradients([q, k, v], out, expected.transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="torch takes FA3 on a Hopper GPU alone",
)
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu(causal):
    """Nothing is taken out."""
    table = torch._C._dispatch_dump("aten::_flash_attention_forward").splitlines()
    assert [line for line in table if line.startswith("CUDA: ") and "_fa3.py" in line]
    shapes = (2, HEADS, 20, HEAD_DIM), *2 * [(2, HEADS_K, 20, HEAD_DIM)]
    q, k, v = leaves(*shapes, device="cuda")
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    expected = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    same_gradients([q, k, v], out, expected.transpose(1, 2))


@pytest.mark.skipif("enable_gqa" not in VARLEN, reason="this torch has no GQA and windows here")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 2)])
def test_varlen(window):
    q, k, v = leaves((30, HEADS, HEAD_DIM), *2 * [(93, HEADS_K, HEAD_DIM)])
    lengths = ints(0, 9, 10, 30), ints(0, 33, 73, 93), 20, 40
    out = varlen_attn(q, k, v, *lengths, window_size=window, enable_gqa=True)
    expected = flash_attn_varlen_func(q, k, v, *lengths, window_size=window)
    torch.testing.assert_close(out, expected)
    same_gradients([q, k, v], out, expected)


@pytest.mark.skipif("block_table" not in VARLEN, reason="this torch has no pages here")
@pytest.mark.parametrize("num_splits", [None, 1])
def test_pages_and_used_keys(num_splits):
    q, k, v = (x.detach() for x in leaves((30, HEADS, HEAD_DIM), *2 * [(8, 16, HEADS_K, HEAD_DIM)]))
    table = torch.tensor([[3, 0, 1], [2, -1, -1], [7, 5, -1]], dtype=torch.int32)
    ends = ints(0, 9, 10, 30)
    options = {
        "seqused_k": ints(30, 5, 20), "block_table": table, "window_size": (-1, 0),
        "enable_gqa": True, "num_splits": num_splits,
    }  # fmt: skip
    expected = flash_attn_varlen_func(
        q, k, v, ends, ints(0, 30, 35, 55), 20, 48, causal=True, block_table=table
    )
    torch.testing.assert_close(
        varlen_attn(q, k, v, ends, None, 20, 48, **options), expected, atol=1e-2, rtol=1e-2
    )
    out = torch.empty_like(q)
    attention.varlen.varlen_attn_out(out, q, k, v, ends, None, 20, 48, **options)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
