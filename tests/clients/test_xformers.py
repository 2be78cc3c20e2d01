"""A client as it is: the flash operators of `xformers`, on the raw module and FA3's operators."""

from __future__ import annotations

import functools

import pytest
import torch

import flash_attn_2_cuda
import flash_attn_interface as fa3
from tests.clients.no_worse import assert_no_worse

client = pytest.importorskip("xformers.ops.fmha")

from xformers.ops.fmha import attn_bias, flash  # noqa: E402

LENGTHS = [20, 7, 33]


def test_it_takes_the_raw_module():
    assert flash._flash_attn_cuda is flash_attn_2_cuda
    assert flash.FwOp.VERSION == "2.8.3"


@pytest.fixture
def flash3():
    return pytest.importorskip("xformers.ops.fmha.flash3")


def test_it_takes_the_operators_of_fa3(flash3):
    """It has compared their schemas by then, and says so where they do not fit."""
    assert flash3._flash_attention3_incompatible_reason() is None
    assert flash3._C_flashattention3 is torch.ops.flash_attn_3
    assert flash3.FwOp.VERSION == flash3.BwOp.VERSION == "pip_pkg"


@pytest.mark.parametrize("packed", [False, True])
def test_calls_of_the_operators_of_fa3(flash3, packed, device):
    """The functions behind its own operators, which are for CUDA tensors."""
    total = sum(LENGTHS)
    q, k, v = (torch.randn(1, total, 4, 64, device=device).bfloat16() for _ in "qkv")
    ends = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)] if packed else [0, total]
    lengths = [torch.tensor(ends, dtype=torch.int32, device=device)] * 2 + [total] * 2
    leaves = [x[0].clone().requires_grad_() for x in (q, k, v)]
    expected = fa3.flash_attn_varlen_func(*leaves, *lengths, causal=True)
    dout = torch.randn_like(expected)
    x, cu_seqlens = (q, k, v), [None, None]
    if packed:
        x, cu_seqlens = [y[0] for y in x], lengths[:2]
    out, lse = flash3.mha_fwd._init_fn(
        *x, *cu_seqlens, None, None, total, total, 0.0, 0.125, True, window_right=0
    )
    gradients = flash3.mha_bwd._init_fn(
        False, dout.view_as(out), *x, out, lse, *cu_seqlens, total, total, 0.125, True, -1, 0
    )
    torch.testing.assert_close(out.view_as(expected), expected, atol=1e-2, rtol=1e-2)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, leaves, dout)):
        torch.testing.assert_close(ours.view_as(theirs), theirs, atol=2e-2, rtol=2e-2)


def written_out(q, k, v, packed: bool):
    """Causal attention, of (b, s, h, d) or of sequences of LENGTHS in one row."""
    if packed:
        parts = zip(*(x.split(LENGTHS, dim=1) for x in (q, k, v)))
        return torch.cat([written_out(*part, packed=False) for part in parts], dim=1)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def attended(q, k, v, packed: bool, operators=flash):
    bias = attn_bias.LowerTriangularMask()
    if packed:
        bias = attn_bias.BlockDiagonalMask.from_seqlens(LENGTHS).make_causal()
    op = (operators.FwOp, operators.BwOp)
    return client.memory_efficient_attention(q, k, v, attn_bias=bias, op=op)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.skipif(not client.common._built_with_cuda, reason="xformers' own library is not there")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["flash", "flash3"])
def test_memory_efficient_attention(family, packed):
    operators = pytest.importorskip(f"xformers.ops.fmha.{family}")
    most = operators.FwOp.CUDA_MAXIMUM_COMPUTE_CAPABILITY
    if most is not None and torch.cuda.get_device_capability() > most:
        pytest.skip(f"xformers has these operators up to compute capability {most}")
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1 if packed else 2, sum(LENGTHS), 4, 64)
    exact = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in "qkv"]
    dout = torch.randn(shape, device="cuda", generator=generator)
    results = []
    ours = functools.partial(attended, operators=operators)
    for function, dtype in (
        (written_out, torch.float32), (written_out, torch.bfloat16), (ours, torch.bfloat16)
    ):  # fmt: skip
        inputs = [x.to(dtype).requires_grad_() for x in exact]
        out = function(*inputs, packed=packed)
        gradients = torch.autograd.grad(out, inputs, dout.to(dtype))
        results.append({"out": out.detach(), **dict(zip("qkv", gradients))})
    assert_no_worse(*results)
