"""The norms of a subset of rows, and the reference formulas, against ``layer_norm_fn``."""

from __future__ import annotations

import pytest
import torch

from flash_attn.ops.layer_norm import dropout_add_layer_norm, dropout_add_layer_norm_subset
from flash_attn.ops.rms_norm import dropout_add_rms_norm, dropout_add_rms_norm_subset
from flash_attn.ops.triton.layer_norm import (
    layer_norm_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)

SUBSET = {
    "layer": (dropout_add_layer_norm_subset, dropout_add_layer_norm),
    "rms": (dropout_add_rms_norm_subset, dropout_add_rms_norm),
}
F64 = {"dtype": torch.float64}
KEPT = torch.tensor([True, False, True, True, False, True])
PLACES = torch.where(KEPT, KEPT.cumsum(0), 0).int()  # from 1; 0 is none


def leaves(*shapes):
    return [torch.randn(*shape, **F64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("kind", SUBSET)
@pytest.mark.parametrize("of_result", [False, True])
def test_subset(kind, of_result):
    subset, whole = SUBSET[kind]
    x0, residual, weight, bias, scale = inputs = leaves((4, 5), (2, 3, 5), (5,), (5,), (5,))
    rows = torch.zeros(6, 5, **F64).index_copy(0, KEPT.nonzero()[:, 0], x0).view(2, 3, 5)
    expected, expected_z = whole(
        1.5 * rows, residual, weight, bias, 0.0, 1e-5, layerscale=scale, prenorm=True
    )
    places = PLACES.view(2, 3)
    extra = {"out_subset": places, "out_numrows": 4} if of_result else {}
    y, z = subset(
        x0, residual, weight, bias, 0.0, 1e-5, layerscale=scale, x0_subset=places,
        rowscale_const=1.5, prenorm=True, **extra,
    )  # fmt: skip
    expected = expected.flatten(0, 1)[KEPT] if of_result else expected
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(z, expected_z)
    ours, theirs = (
        torch.autograd.grad(a.square().sum() + b.sum(), inputs, retain_graph=True)
        for a, b in ((y, z), (expected, expected_z))
    )
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", SUBSET)
def test_subset_of_all_rows_and_dropout(kind):
    subset, whole = SUBSET[kind]
    x0, weight, bias = leaves((2, 3, 5), (5,), (5,))
    torch.testing.assert_close(
        subset(x0, None, weight, bias, 0.0, 1e-5).view_as(x0),
        whole(x0, None, weight, bias, 0, 1e-5),
    )
    y, mask = subset(x0, x0, weight, bias, 0.5, 1e-5, return_dropout_mask=True)
    dropped = torch.where(mask, 2 * x0.view(6, 5), 0).view_as(x0)
    torch.testing.assert_close(y, whole(dropped, x0, weight, bias, 0.0, 1e-5))


@pytest.mark.parametrize(
    ("reference", "right"), [(layer_norm_ref, layer_norm_fn), (rms_norm_ref, rms_norm_fn)]
)
@pytest.mark.parametrize("upcast", [False, True])
def test_reference(reference, right, upcast):
    x, residual, x1 = (torch.randn(4, 6) for _ in range(3))
    weight, bias, weight1, bias1 = (torch.randn(6) for _ in range(4))
    rows = torch.rand(4)
    options = {"residual": residual, "eps": 1e-3, "zero_centered_weight": True}
    torch.testing.assert_close(
        reference(x, weight, bias, rowscale=rows, upcast=upcast, **options),
        right(x, weight, bias, rowscale=rows, **options),
    )
    second = {"x1": x1, "weight1": weight1, "bias1": bias1, "prenorm": True}
    ours = reference(x, weight, bias, upcast=upcast, **second, **options)
    theirs = right(x, weight, bias, **second, **options)
    assert len(ours) == len(theirs) == 3
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


def test_reference_takes_the_masks():
    x, x1, weight = torch.randn(4, 6), torch.randn(4, 6), torch.ones(6)
    y, z, mask, mask1 = layer_norm_fn(
        x, weight, None, x1=x1, dropout_p=0.3, prenorm=True, return_dropout_mask=True
    )
    ours = layer_norm_ref(
        x, weight, None, x1=x1, dropout_p=0.3, prenorm=True, dropout_mask=mask, dropout_mask1=mask1
    )
    torch.testing.assert_close(ours, (y, z))


def test_reference_rounds_as_its_inputs_do():
    x = torch.randn(64, 256).bfloat16()
    weight, exact = torch.ones(256).bfloat16(), None
    rough, fine = (layer_norm_ref(x, weight, None, upcast=u) for u in (False, True))
    exact = torch.nn.functional.layer_norm(x.double(), (256,), eps=1e-6)
    assert rough.dtype == fine.dtype == torch.bfloat16
    assert (fine - exact).abs().max() <= (rough - exact).abs().max()
