"""Hopper's forward whose products take Q, K, V and P as codes (e4m3)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BF16, FP16
from compare import assert_lse
from reference import attention_ref

from . import calls
from .rows import TABLE
from .test_decode_codes import E4M3, every_code

FIRST = [v for v in TABLE if v.dtype == "e4m3"]
#: Rows as they are with their first tile, and with their second one.
ROWS = FIRST + [replace(v, block_n=v.second_block_n) for v in FIRST if v.second_block_n]
PLAIN = [v for v in ROWS if v.scores == "plain"]


def named(row) -> str:
    return f"{row.name}-{row.block_n}"


def on_tile(kernels, row) -> calls.OnTile:
    return calls.OnTile(kernels, "second" if row.block_n == row.second_block_n else "first")


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
        on_tile(kernels, row), row.name, q, k, v, out_dtype=out_dtype,
        codes=calls.code_descales(scales[1], scales[2], scales[0]), **options,
    )  # fmt: skip
    expected, expected_lse, p = attention_ref(*numbers, **options)
    assert_lse("lse", lse, expected_lse)
    model, bound = rounded_probabilities(p, numbers[2], row.block_n)
    rounding = torch.finfo(out_dtype).eps * expected.abs()
    assert ((out - expected).abs() <= bound + rounding + 1e-6).all()
    # Numbers of P between two codes may become either, which few do.
    assert (out - model).norm() <= 4e-3 * model.norm() + 1e-6


def rounded_probabilities(p, v, block_n):
    """O by P in codes, scaled in each row and block of keys, and a bound on what that changes.

    p (b, h, sq, sk), v (b, sk, hk, dv) -> (b, sq, h, dv) twice."""
    group = p.shape[1] // v.shape[2] if v.shape[2] else 1
    v = v.double().repeat_interleave(group, 2)
    blocks = [torch.zeros(*p.shape[:3], 0, dtype=p.dtype)]
    for block in p.split(block_n, -1) if p.shape[-1] else []:
        top = block.amax(-1, keepdim=True)
        scale = torch.where(top > 0, top / 256, 1.0)
        blocks.append((block / scale).float().to(E4M3).double() * scale)
    rounded = torch.cat(blocks, -1)
    out = torch.einsum("bhqk,bkhd->bqhd", rounded, v)
    # A sixteenth of each, or half of the least code.
    change = p / 16 + p.amax(-1, keepdim=True) * 2.0**-18 if p.shape[-1] else p
    return out, torch.einsum("bhqk,bkhd->bqhd", change, v.abs())


def random_codes(gen, *shape):
    return torch.randn(*shape, generator=gen).to(E4M3)


@pytest.mark.parametrize("row", ROWS, ids=named)
@pytest.mark.parametrize(("sq", "sk"), [(1, 77), (130, 300), (200, 129), (64, 0)])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (60, 20)}],
    ids=["full", "causal", "window"],
)
def test_masks(kernels, row, sq, sk, options):
    gen = torch.Generator().manual_seed(sq + sk)
    d, dv = row.head_dim, row.head_dim_v
    q, k, v = (random_codes(gen, 2, *size) for size in ((sq, 4, d), (sk, 2, d), (sk, 2, dv)))
    scales = [torch.rand(2, 2, generator=gen) + 0.5 for _ in "qkv"]
    if row.scores == "full":
        options = options | {"softcap": 20.0}
    check(kernels, row, q, k, v, scales, **options)


@pytest.mark.parametrize("row", PLAIN, ids=named)
@pytest.mark.parametrize("out_dtype", [BF16, FP16])
def test_head_dims_and_dtype_of_out(kernels, row, out_dtype):
    gen = torch.Generator().manual_seed(1)
    d, dv = row.head_dim - 32, row.head_dim_v - 16
    q, k, v = (random_codes(gen, 2, *size) for size in ((70, 4, d), (200, 2, d), (200, 2, dv)))
    check(kernels, row, q, k, v, out_dtype=out_dtype, causal=True)
    d, dv = row.head_dim, row.head_dim_v
    q, k, v = (random_codes(gen, 1, *size) for size in ((70, 6, d), (200, 1, d), (200, 1, dv)))
    sinks = torch.randn(6, generator=gen)
    check(kernels, row, q, k, v, out_dtype=out_dtype, s_aux=sinks)


@pytest.mark.parametrize("row", [v for v in ROWS if v.scores == "full"], ids=named)
def test_alibi(kernels, row):
    gen = torch.Generator().manual_seed(2)
    q, k, v = (random_codes(gen, 2, s, h, row.head_dim) for s, h in ((70, 4), (200, 2), (200, 2)))
    slopes = torch.rand(4, generator=gen) * 0.3
    for options in ({}, {"softcap": 10.0}, {"causal": True}):
        check(kernels, row, q, k, v, alibi_slopes=slopes, **options)


@pytest.mark.parametrize("row", PLAIN, ids=named)
@pytest.mark.parametrize("of", ["q", "k", "v"])
@pytest.mark.parametrize("nan", [False, True])
def test_every_code(kernels, row, of, nan):
    """In every column. A scale of 2⁻⁶ keeps scores of large codes apart, but not far apart."""
    gen = torch.Generator().manual_seed(3)
    dims = {"q": row.head_dim, "k": row.head_dim, "v": row.head_dim_v}
    x = {name: random_codes(gen, 1, 256, 1, d) for name, d in dims.items()}
    x[of] = every_code(dims[of], nan)
    unit = 2.0**-6
    numbers = {name: codes.float() * unit for name, codes in x.items()}
    expected, _, p = attention_ref(*numbers.values())
    out, _ = calls.dense(
        on_tile(kernels, row),
        row.name,
        *x.values(),
        codes=calls.code_descales(unit, unit, unit),
        out_dtype=BF16,
    )
    assert torch.equal(out.isnan(), expected.isnan())
    _, bound = rounded_probabilities(p, numbers["v"], row.block_n)
    seen = ~expected.isnan()
    rounding = 2.0**-8 * expected.abs() + 2.0**-11 * numbers["v"].abs().nan_to_num().amax()
    assert ((out - expected).abs() <= bound + rounding)[seen].all()


@pytest.mark.parametrize("row", PLAIN, ids=named)
def test_a_block_of_small_probabilities_has_a_scale_of_its_own(kernels, row):
    """The keys beside the largest have a hundredth of the weight together. By a scale of the
    whole row each of them would be 0."""
    gen = torch.Generator().manual_seed(4)
    d, keys = row.head_dim, 6000
    q, k = torch.zeros(1, 80, 1, d), torch.zeros(1, keys, 1, d)
    q[..., 0], k[:, -40, :, 0] = 1.0, 13.0  # in the block that comes first
    v = torch.randn(1, keys, 1, row.head_dim_v, generator=gen) + 1
    check(kernels, row, *(x.to(E4M3) for x in (q, k, v)), softmax_scale=1.0)


@pytest.mark.parametrize("row", PLAIN, ids=named)
def test_negative_scores(kernels, row):
    """Of all keys, of the first block, of the first rows."""
    gen = torch.Generator().manual_seed(5)
    d = row.head_dim
    q, k = (torch.rand(1, s, 2, d, generator=gen) + 0.1 for s in (150, 500))
    v = random_codes(gen, 1, 500, 2, row.head_dim_v)
    for negative in (slice(None), slice(200), slice(300, None)):
        keys = k.clone()
        keys[:, negative] *= -1
        check(kernels, row, q.to(E4M3), keys.to(E4M3), v, softmax_scale=0.2)
    q[:, :70] *= -1
    check(kernels, row, q.to(E4M3), k.to(E4M3), v, softmax_scale=0.2)
