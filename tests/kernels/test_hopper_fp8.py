"""Hopper's forward whose products take Q, K, V and P as codes (e4m3)."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BF16, FP16
from compare import assert_lse
from reference import attention_ref

from . import calls
from .rows import TABLE, id_of
from .test_decode_codes import E4M3, every_code

ROWS = [v for v in TABLE if v.dtype == "e4m3"]
PLAIN = [v for v in ROWS if v.scores == "plain"]


def check(kernels, row, q, k, v, scales=None, out_dtype=BF16, **options) -> None:
    """q, k, v: codes (b, s, h or hk, d or dv); scales of each: (b, hk)."""
    heads, heads_k = q.shape[2], k.shape[2]
    scales = scales or [torch.ones(q.shape[0], heads_k)] * 3
    q_scale, k_scale, v_scale = (s[:, None, :, None] for s in scales)
    numbers = (
        q.float() * q_scale.repeat_interleave(heads // heads_k, 2),
        k.float() * k_scale,
        v.float() * v_scale,
    )
    out, lse = calls.dense(
        kernels, row.name, q, k, v, codes=calls.code_scales(scales[1], scales[2], scales[0]),
        out_dtype=out_dtype, **options,
    )  # fmt: skip
    expected, expected_lse, p = attention_ref(*numbers, **options)
    assert_lse("lse", lse, expected_lse)
    model, bound = rounded_probabilities(p, numbers[2], row.block_n)
    rounding = torch.finfo(out_dtype).eps * expected.abs()
    assert ((out - expected).abs() <= bound + rounding + 1e-6).all()
    # Numbers of P between two codes may become either, which few do.
    assert (out - model).norm() <= 4e-3 * model.norm() + 1e-6


def rounded_probabilities(p, v, block_n):
    """O by P in codes, in units of each row and block of keys, and a bound on what that changes.

    p (b, h, sq, sk), v (b, sk, hk, dv) -> (b, sq, h, dv) twice."""
    group = p.shape[1] // v.shape[2] if v.shape[2] else 1
    v = v.double().repeat_interleave(group, 2)
    blocks = [torch.zeros(*p.shape[:3], 0, dtype=p.dtype)]
    for block in p.split(block_n, -1) if p.shape[-1] else []:
        top = block.amax(-1, keepdim=True)
        unit = torch.where(top > 0, top / 256, 1.0)
        blocks.append((block / unit).float().to(E4M3).double() * unit)
    rounded = torch.cat(blocks, -1)
    out = torch.einsum("bhqk,bkhd->bqhd", rounded, v)
    # A sixteenth of each, or half of the least code.
    change = p / 16 + p.amax(-1, keepdim=True) * 2.0**-18 if p.shape[-1] else p
    return out, torch.einsum("bhqk,bkhd->bqhd", change, v.abs())


def random_codes(gen, *shape):
    return torch.randn(*shape, generator=gen).to(E4M3)


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize(("sq", "sk"), [(1, 77), (130, 300), (200, 129), (64, 0)])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (60, 20)}],
    ids=["full", "causal", "window"],
)
def test_masks(kernels, row, sq, sk, options):
    gen = torch.Generator().manual_seed(sq + sk)
    d = row.head_dim
    q, k, v = (random_codes(gen, 2, s, h, d) for s, h in ((sq, 4), (sk, 2), (sk, 2)))
    scales = [torch.rand(2, 2, generator=gen) + 0.5 for _ in "qkv"]
    if row.scores == "full":
        options = options | {"softcap": 20.0}
    check(kernels, row, q, k, v, scales, **options)
