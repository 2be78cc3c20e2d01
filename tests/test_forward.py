"""The dense forward pass against the float64 reference, and the forms in which it is called."""

from __future__ import annotations

import pytest
import torch
from calls import check_forward
from cases import (
    BF16,
    FEATURE_CASES,
    FP32,
    FP64,
    LONG_CASES,
    PLAIN_CASES,
    Case,
    make_inputs,
    random_case,
)
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, gradients, standard_attention

from flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func


@pytest.mark.parametrize("causal", [False, True])
def test_our_reference_is_attention(causal):
    """Against torch's own in float64, grouped heads and gradients included."""
    q, k, v = (torch.randn(2, 20, h, 8, dtype=FP64) for h in (4, 2, 2))
    ours, _, grads = gradients(
        lambda q, k, v: attention_ref(q, k, v, causal=causal)[:2], {"q": q, "k": k, "v": v}, 2 * q
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in leaves), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(ours, out.detach())
    expected = torch.autograd.grad(out, leaves, 2 * q.detach())
    for grad, other in zip(grads.values(), expected, strict=True):
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_plain(case, device, needs):
    with needs(*case.features):
        check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_features(case, device, needs):
    with needs(*case.features):
        check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_several_tiles(case, device, needs):
    with needs(*case.features):
        check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("seed", range(40))
def test_random(seed, device, needs):
    case = random_case(seed)
    with needs(*case.features):
        check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("d", [1, 2, 7, 8, 9, 16, 31, 48, 72, 96, 111, 120])
def test_every_head_dim(d, device):
    case = Case(b=1, sq=40, sk=70, d=d, causal=True, layout="contiguous")
    check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("d", [129, 160, 192, 224, 255, 256])
def test_every_large_head_dim(d, device, needs):
    case = Case(b=1, sq=40, sk=70, d=d, causal=True, layout="contiguous")
    with needs(*case.features):
        check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("return_lse", [False, True])
def test_what_is_returned(return_lse, device, needs):
    case = Case()
    x = make_inputs(case, device)
    plain = flash_attn_func(x.q, x.k, x.v)
    assert isinstance(plain, torch.Tensor)
    assert plain.shape == (case.b, case.sq, case.h, case.d)
    assert plain.dtype == case.dtype
    if return_lse:
        out, lse = flash_attn_func(x.q, x.k, x.v, return_lse=True)
        assert lse.shape == (case.b, case.h, case.sq)
        assert lse.dtype == torch.float32
        assert_bitwise("out", out, plain)
    with needs("attn_probs"):
        out, lse, probs = flash_attn_func(
            x.q, x.k, x.v, return_attn_probs=True, return_lse=return_lse
        )
        assert probs.shape == (case.b, case.h, case.sq, case.sk)
        assert_bitwise("out", out, plain)
        assert_lse("lse", lse, attention_ref(x.q, x.k, x.v)[1])


def test_positional_arguments_keep_their_places(device, needs):
    case = Case(causal=True, window=(20, 0), scale=0.2)
    x = make_inputs(case, device)
    by_name = flash_attn_func(
        x.q, x.k, x.v, softmax_scale=0.2, causal=True, window_size=(20, 0), deterministic=True
    )
    by_place = flash_attn_func(x.q, x.k, x.v, 0.0, 0.2, True, (20, 0), 0.0, None, True, False)
    assert_bitwise("out", by_place, by_name)
    with needs("softcap", "alibi"):
        slopes = torch.full((case.h,), 0.1, device=device)
        by_name = flash_attn_func(x.q, x.k, x.v, softcap=7.0, alibi_slopes=slopes)
        by_place = flash_attn_func(x.q, x.k, x.v, 0.0, None, False, (-1, -1), 7.0, slopes)
        assert_bitwise("out", by_place, by_name)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_functions_equal_unpacked(causal, device):
    qkv = torch.randn(2, 113, 3, 4, 64, device=device).to(BF16)
    q, k, v = qkv.unbind(2)
    expected, expected_lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    out, lse = flash_attn_qkvpacked_func(qkv, causal=causal, return_lse=True)
    assert_bitwise("qkvpacked out", out, expected)
    assert_bitwise("qkvpacked lse", lse, expected_lse)
    kv = torch.randn(2, 150, 2, 2, 64, device=device).to(BF16)
    expected = flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], causal=causal, window_size=(40, -1))
    out = flash_attn_kvpacked_func(q, kv, causal=causal, window_size=(40, -1))
    assert_bitwise("kvpacked out", out, expected)


def test_expanded_keys_are_read_through_zero_strides(device):
    x = make_inputs(Case(b=1, hk=1), device)
    q = x.q.expand(3, -1, -1, -1)
    k, v = x.k.expand(3, -1, 4, -1), x.v.expand(3, -1, 4, -1)
    out = flash_attn_func(q, k, v, causal=True)
    ref, _, _ = attention_ref(q, k, v, causal=True)
    std, _, _ = standard_attention(q, k, v, causal=True)
    assert_accurate("out", out, ref, std)


def test_expanded_rows_are_read_through_zero_strides(device):
    q = torch.randn(2, 70, 2, 64, device=device).to(BF16)
    k, v = torch.randn(2, 2, 1, 2, 64, device=device).to(BF16).expand(2, 2, 90, 2, 64)
    assert_bitwise("out", flash_attn_func(q, k, v), v[:, :70])


def test_inputs_are_left_alone(device):
    x = make_inputs(Case(causal=True), device)
    before = [t.clone() for t in (x.q, x.k, x.v)]
    flash_attn_func(x.q, x.k, x.v, causal=True)
    for name, now, then in zip("qkv", (x.q, x.k, x.v), before, strict=True):
        assert_bitwise(name, now, then)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5, 8.0])
def test_any_softmax_scale(scale, device):
    case = Case(scale=scale, causal=True)
    check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("softcap", [1e-2, 1.0, 50.0, 1e6])
def test_any_softcap(softcap, device, needs):
    case = Case(softcap=softcap, dtype=FP32, kind="outliers")
    with needs(*case.features):
        check_forward(case, make_inputs(case, device))


def test_attention_probabilities_without_dropout(device, needs):
    case = Case(sq=50, sk=90, causal=True, window=(30, 0))
    x = make_inputs(case, device)
    with needs("attn_probs"):
        _, _, probs = flash_attn_func(
            x.q, x.k, x.v, causal=True, window_size=(30, 0), return_attn_probs=True
        )
        _, _, ref = attention_ref(x.q, x.k, x.v, **case.mask_kwargs())
        _, _, std = standard_attention(x.q, x.k, x.v, **case.mask_kwargs())
        assert_accurate("S_dmask", probs.to(std.dtype), ref, std)
