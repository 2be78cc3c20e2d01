"""A client as it is: the flash operators of `xformers`, on the raw module."""

from __future__ import annotations

import pytest
import torch

import flash_attn_2_cuda
from tests.clients.no_worse import assert_no_worse

client = pytest.importorskip("xformers.ops.fmha")

from xformers.ops.fmha import attn_bias, flash  # noqa: E402

LENGTHS = [20, 7, 33]


def test_it_takes_the_raw_module():
    assert flash._flash_attn_cuda is flash_attn_2_cuda
    assert flash.FwOp.VERSION == "2.8.3"


def written_out(q, k, v, packed: bool):
    """Causal attention, of (b, s, h, d) or of sequences of LENGTHS in one row."""
    if packed:
        parts = zip(*(x.split(LENGTHS, dim=1) for x in (q, k, v)))
        return torch.cat([written_out(*part, packed=False) for part in parts], dim=1)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def attended(q, k, v, packed: bool):
    bias = attn_bias.LowerTriangularMask()
    if packed:
        bias = attn_bias.BlockDiagonalMask.from_seqlens(LENGTHS).make_causal()
    operators = (flash.FwOp, flash.BwOp)
    return client.memory_efficient_attention(q, k, v, attn_bias=bias, op=operators)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.skipif(not client.common._built_with_cuda, reason="xformers' own library is not there")
@pytest.mark.parametrize("packed", [False, True])
def test_memory_efficient_attention(packed):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1 if packed else 2, sum(LENGTHS), 4, 64)
    exact = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in "qkv"]
    dout = torch.randn(shape, device="cuda", generator=generator)
    results = []
    for function, dtype in (
        (written_out, torch.float32), (written_out, torch.bfloat16), (attended, torch.bfloat16)
    ):  # fmt: skip
        inputs = [x.to(dtype).requires_grad_() for x in exact]
        out = function(*inputs, packed=packed)
        gradients = torch.autograd.grad(out, inputs, dout.to(dtype))
        results.append({"out": out.detach(), **dict(zip("qkv", gradients))})
    assert_no_worse(*results)
