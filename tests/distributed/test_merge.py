"""Parts merged by their LSE are the whole, in every dtype and where nothing is seen."""

from __future__ import annotations

import math

import pytest
import torch
from compare import LSE_TOLERANCE, assert_within

from flash_attn import flash_attn_func
from flash_attn.distributed import merge_attention


def parts(dtype, keys=((0, 30), (30, 31), (31, 90))):
    q, k, v = (torch.randn(2, 90, h, 16, dtype=torch.float64).to(dtype) for h in (4, 2, 2))
    whole = flash_attn_func(q, k, v, return_lse=True)
    return whole, [flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in keys]


@pytest.mark.parametrize(
    ("dtype", "kept", "bar"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 2e-6),
        (torch.bfloat16, torch.float32, 8e-3),
        (torch.bfloat16, torch.bfloat16, 1.2e-2),
        (torch.float16, torch.float16, 2e-3),
    ],
    ids=str,
)
def test_parts_are_the_whole(dtype, kept, bar):
    (whole, whole_lse), ((out, lse), *others) = parts(dtype)
    out = out.to(kept)
    at = out.data_ptr(), lse.data_ptr()
    for part in others:
        merge_attention(out, lse, *part)
    assert at == (out.data_ptr(), lse.data_ptr())
    assert_within("out", out.double(), whole.double(), bar)
    assert_within("lse", lse, whole_lse, LSE_TOLERANCE if dtype.itemsize == 2 else 1e-5)


def test_rows_that_see_nothing_count_for_nothing():
    (out, lse), _ = parts(torch.float32)
    before, lse_before = out.clone(), lse.clone()
    nothing = torch.full_like(lse, -math.inf)
    merge_attention(out, lse, torch.full_like(out, math.nan), nothing)
    assert torch.equal(out, before)
    assert torch.equal(lse, lse_before)
    empty = torch.zeros_like(out)
    merge_attention(empty, nothing, out, lse)
    assert_within("out", empty, before, 0.0)
    assert_within("lse", nothing, lse_before, 0.0)


def test_slices_of_a_larger_tensor():
    (whole, whole_lse), ((out, lse), _, (last, last_lse)) = parts(
        torch.float64, ((0, 30), (0, 30), (30, 90))
    )
    rows = slice(20, 70)
    merge_attention(out[:, rows], lse[:, :, rows], last[:, rows], last_lse[:, :, rows])
    assert_within("out", out[:, rows], whole[:, rows], 1e-12)
    assert_within("lse", lse[:, :, rows], whole_lse[:, :, rows], 1e-12)


def test_writes_are_counted_and_the_operation_is_well_formed():
    _, ((out, lse), part, _) = parts(torch.float32)
    versions = out._version, lse._version
    merge_attention(out, lse, *part)
    assert out._version > versions[0]
    assert lse._version > versions[1]
    torch.library.opcheck(torch.ops.flash_attn.merge_attention, (out, lse, *part))


def test_wrong_shapes_are_named():
    _, ((out, lse), part, _) = parts(torch.float32)
    with pytest.raises(ValueError, match="out_b"):
        merge_attention(out, lse, part[0][:1], part[1])
    with pytest.raises(ValueError, match="lse_b"):
        merge_attention(out, lse, part[0], part[1][:, :, :1])
