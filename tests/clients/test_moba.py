"""A client as it is: mixture of block attention of `fla-core`, on the private functions.

It needs Triton, and so a GPU.
"""

from __future__ import annotations

import pytest
import torch

import flash_attn
from tests.clients.no_worse import assert_no_worse

client = pytest.importorskip("fla.ops.moba", exc_type=ImportError)

LENGTHS = (200, 64, 130)


def written_out(q, k, v):
    """Causal attention of each sequence; (1, total, heads, head_dim)."""
    parts = []
    for q_, k_, v_ in zip(*(x[0].split(LENGTHS) for x in (q, k, v))):
        scores = torch.einsum("ihd,jhd->hij", q_, k_) * q.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hij,jhd->ihd", weights, v_))
    return torch.cat(parts)[None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_all_blocks_chosen_are_causal_attention():
    assert client.parallel_moba.__globals__["flash_attn_varlen_func"] is (
        flash_attn.flash_attn_varlen_func
    )
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    generator = torch.Generator("cuda").manual_seed(0)
    exact = [
        torch.randn(1, sum(LENGTHS), 4, 64, device="cuda", generator=generator).bfloat16()
        for _ in "qkv"
    ]
    dout = torch.randn(exact[0].shape, device="cuda", generator=generator)

    def moba(q, k, v):
        chunks = -(-max(LENGTHS) // 32)
        return client.parallel_moba(q, k, v, ends, max(LENGTHS), chunk_size=32, topk=chunks)

    results = []
    for function, dtype in (
        (written_out, torch.float32), (written_out, torch.bfloat16), (moba, torch.bfloat16)
    ):  # fmt: skip
        inputs = [x.to(dtype).requires_grad_() for x in exact]
        out = function(*inputs)
        gradients = torch.autograd.grad(out, inputs, dout.to(dtype))
        results.append({"out": out.detach(), **dict(zip("qkv", gradients))})
    assert_no_worse(*results)
