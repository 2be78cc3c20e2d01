"""Parts merged by their LSE are the whole, in every dtype and where nothing is seen."""

from __future__ import annotations

import math

import pytest
import torch
from compare import assert_within
from reference import attention_ref

from flash_attn.distributed import merge_attention

KEYS = ((0, 30), (30, 31), (31, 90))


def parts(device, dtype, kept=None, keys=KEYS, head_dim=40):
    """(out, lse) of the whole in float64, and of each part; the first part's out in ``kept``."""
    q, k, v = (torch.randn(2, 90, h, head_dim, dtype=torch.float64) for h in (4, 2, 2))
    whole = attention_ref(q, k, v)[:2]
    lse_dtype = torch.promote_types(dtype, torch.float32)
    found = []
    for a, b in keys:
        out, lse, _ = attention_ref(q, k[:, a:b], v[:, a:b])
        found.append((out.to(device, dtype), lse.to(device, lse_dtype).contiguous()))
    found[0] = (found[0][0].to(kept or dtype), found[0][1])
    return tuple(x.to(device) for x in whole), found


@pytest.mark.parametrize(
    ("dtype", "kept", "bar"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 2e-6),
        (torch.bfloat16, torch.float32, 8e-3),
        (torch.bfloat16, torch.bfloat16, 1.2e-2),
        (torch.float16, torch.float32, 1e-3),
        (torch.float16, torch.float16, 2e-3),
    ],
    ids=str,
)
def test_parts_are_the_whole(device, dtype, kept, bar):
    (whole, whole_lse), ((out, lse), *others) = parts(device, dtype, kept)
    at = out.data_ptr(), lse.data_ptr()

    if device == "cuda" and dtype in (torch.float32, torch.float64):
        said = "lse_a: got dtype" if dtype is torch.float64 else "out_b: got dtype"
        with pytest.raises(ValueError, match=said):
            merge_attention(out, lse, *others[0])
        return
    for part in others:
        merge_attention(out, lse, *part)
    assert at == (out.data_ptr(), lse.data_ptr())
    assert_within("out", out.double(), whole, bar)
    assert_within("lse", lse, whole_lse, 1e-5)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_see_nothing_count_for_nothing(device, kept):
    _, ((out, lse), part, _) = parts(device, torch.bfloat16, kept)
    before, lse_before = out.clone(), lse.clone()
    nothing = torch.full_like(lse, -math.inf)
    merge_attention(out, lse, torch.full_like(part[0], math.nan), nothing)
    assert torch.equal(out, before)
    assert torch.equal(lse, lse_before)
    empty = torch.zeros_like(out)
    merge_attention(empty, nothing, *part)
    assert torch.equal(empty, part[0].to(kept))
    assert torch.equal(nothing, part[1])
    merge_attention(empty.zero_(), nothing.fill_(-math.inf), part[0], nothing.clone())
    assert not empty.any()
    assert (nothing == -math.inf).all()


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("into", [torch.bfloat16, torch.float32], ids=str)
def test_merged_into_another_tensor(device, kept, into):
    """With rows that part b does not see, whatever it has there; out_a is left alone."""
    _, ((out, lse), (other, other_lse), _) = parts(device, torch.bfloat16, kept)
    other_lse[:, :, ::3] = -math.inf
    other[:, ::3] = math.nan
    before, in_place, in_place_lse = out.clone(), out.clone().float(), lse.clone()
    merge_attention(in_place, in_place_lse, other, other_lse)
    merged = torch.full_like(out, math.nan, dtype=into)
    merge_attention(out, lse, other, other_lse, merged)
    assert torch.equal(merged, in_place.to(into))
    assert torch.equal(lse, in_place_lse)
    assert torch.equal(out, before)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32], ids=str)
def test_nan_stays(device, kept):
    """Of either part, in out and LSE, unless that part sees nothing."""
    _, ((out, lse), (other, other_lse), _) = parts(device, torch.bfloat16, kept)
    wrong, seen = torch.full_like(lse, math.nan), lse.clone()
    merged, merged_lse = out.clone(), lse.clone()
    merge_attention(merged, merged_lse, other, wrong)
    assert merged.isnan().all()
    assert merged_lse.isnan().all()
    for theirs in (other_lse, torch.full_like(lse, -math.inf)):
        merged_lse = wrong.clone()
        merge_attention(torch.full_like(out, math.nan), merged_lse, other, theirs)
        assert merged_lse.isnan().all()
    assert torch.equal(lse, seen)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32], ids=str)
def test_slices_of_larger_tensors(device, kept):
    (whole, whole_lse), ((out, lse), (other, other_lse)) = parts(
        device, torch.bfloat16, kept, ((0, 30), (30, 90))
    )
    rows, before = slice(20, 71), out.clone()
    merge_attention(out[:, rows], lse[:, :, rows], other[:, rows], other_lse[:, :, rows])
    assert_within("out", out[:, rows].double(), whole[:, rows], 8e-3)
    assert_within("lse", lse[:, :, rows].contiguous(), whole_lse[:, :, rows], 1e-5)
    assert torch.equal(out[:, :20], before[:, :20])
    assert torch.equal(out[:, 71:], before[:, 71:])


def test_large_logits_do_not_overflow(device):
    _, ((out, lse), part, _) = parts(device, torch.bfloat16)
    expected = torch.logaddexp(lse + 30000, part[1] + 30000)
    lse += 30000
    merge_attention(out, lse, part[0], part[1] + 30000)
    assert_within("lse", lse, expected, 4e-3)
    assert torch.isfinite(out).all()


def test_nothing_to_merge(device):
    out, lse = torch.zeros(2, 0, 4, 16, dtype=torch.bfloat16, device=device), torch.zeros(2, 4, 0)
    merge_attention(out, lse.to(device), out.clone(), lse.to(device))


def test_writes_are_counted_and_the_operation_is_well_formed():
    _, ((out, lse), part, _) = parts("cpu", torch.float32)
    versions = out._version, lse._version
    merge_attention(out, lse, *part)
    assert (out._version, lse._version) == (versions[0] + 1, versions[1] + 1)
    operation = torch.ops.flash_attn._merge_attention
    torch.library.opcheck(operation, (out, lse, *part))
    torch.library.opcheck(operation, (out, lse, *part), {"out": torch.empty_like(out)})


def test_wrong_shapes_are_named():
    _, ((out, lse), part, _) = parts("cpu", torch.float32)
    with pytest.raises(ValueError, match="out_b"):
        merge_attention(out, lse, part[0][:1], part[1])
    with pytest.raises(ValueError, match="out: got"):
        merge_attention(out, lse, *part, out[:, :1])
    with pytest.raises(ValueError, match="lse_b"):
        merge_attention(out, lse, part[0], part[1][:, :, :1])
