"""Inputs chosen to break things: not-a-numbers, extremes, degenerate sizes, aliases, odd views."""

from __future__ import annotations

import pytest
import torch
from calls import check_backward, check_forward
from cases import BF16, FP16, FP32, Case, make_inputs
from compare import assert_accurate, assert_bitwise, assert_lse, assert_within
from packed_cases import LENGTHS, pack
from reference import attention_ref, standard_attention

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_around_tiles(length, causal, device):
    for sq, sk in [(length, length), (length, 33), (33, length)]:
        case = Case(b=1, sq=sq, sk=sk, h=2, hk=1, causal=causal, seed=length)
        check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("length", [1, 16, 65, 129])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_lengths_around_tiles(length, causal, device, needs):
    with needs("backward"):
        for sq, sk in [(length, length), (length, 33), (33, length)]:
            case = Case(b=1, sq=sq, sk=sk, h=2, hk=1, causal=causal, seed=length)
            x = make_inputs(case, device)
            check_backward(case, x)
            check_backward(case, x, with_dlse=True)


@pytest.mark.parametrize("window", [(63, 0), (64, 0), (65, 0), (0, 64), (127, 1), (1, 127), (0, 0)])
def test_windows_around_tiles(window, device):
    for sq, sk in [(200, 200), (130, 260), (260, 130)]:
        case = Case(b=1, sq=sq, sk=sk, h=2, hk=1, window=window)
        check_forward(case, make_inputs(case, device))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_query_spoils_its_own_rows_only(value, device):
    x = make_inputs(Case(causal=True), device)
    clean, clean_lse = flash_attn_func(x.q, x.k, x.v, causal=True, return_lse=True)
    x.q[1, 50, 2, 7] = value
    out, lse = flash_attn_func(x.q, x.k, x.v, causal=True, return_lse=True)
    assert torch.isnan(out[1, 50, 2]).all()
    for dirty, expected in [(out, clean), (lse.transpose(1, 2), clean_lse.transpose(1, 2))]:
        others = torch.ones(dirty.shape[:3], dtype=torch.bool, device=device)
        others[1, 50, 2] = False
        assert torch.isfinite(dirty[others]).all()
        torch.testing.assert_close(dirty[others], expected[others])


def test_a_nan_in_the_keys_reaches_every_row_that_sees_it(device):
    x = make_inputs(Case(causal=True, b=1, sq=40, sk=40, hk=4), device)
    x.k[0, 20, 1, 3] = NAN
    out = flash_attn_func(x.q, x.k, x.v, causal=True)
    bad = torch.isnan(out).any(-1)  # (b, sq, h)
    assert bad[0, 20:, 1].all()
    assert not bad[0, :, [0, 2, 3]].any()


def test_infinite_values_give_infinite_outputs(device):
    x = make_inputs(Case(b=1, sq=30, sk=40, hk=4), device)
    x.v[0, 11, 2, 5] = INF
    out = flash_attn_func(x.q, x.k, x.v)
    assert torch.isposinf(out[0, :, 2, 5]).all()
    out[0, :, 2, 5] = 0
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_tens_of_thousands(sign, dtype, device, needs):
    """exp() of any of them overflows or vanishes; only differences may matter."""
    case = Case(dtype=dtype, d=64, sq=50, sk=90)
    x = make_inputs(case, device)
    with needs(*case.features):
        q, k = torch.full_like(x.q, 30.0), torch.full_like(x.k, 30.0 * sign)
        out, lse = flash_attn_func(q, k, x.v, softmax_scale=1.0, return_lse=True)
        mean = x.v.double().mean(1, keepdim=True).repeat_interleave(2, dim=2).expand_as(out)
        assert_within("out", out.double(), mean, 4e-3)
        expected = sign * 57600.0 + torch.tensor(90.0).log()
        torch.testing.assert_close(lse, torch.full_like(lse, float(expected)), atol=0.02, rtol=0)


def test_one_key_takes_all(device, needs):
    """A one-hot softmax: output is that value exactly and no gradient reaches q or k."""
    d = 64
    q = torch.zeros(1, 8, 1, d, dtype=BF16, device=device)
    k = torch.zeros(1, 70, 1, d, dtype=BF16, device=device)
    q[..., 0], k[:, 66, :, 0] = 100.0, 100.0
    v = torch.randn(1, 70, 1, d, device=device).to(BF16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flash_attn_func(*leaves)
    assert_bitwise("out", out.detach(), v[:, 66:67].detach().expand(1, 8, 1, d))
    with needs("backward"):
        out.backward(torch.ones_like(out))
        assert not leaves[0].grad.any()
        assert not leaves[1].grad.any()
        assert (leaves[2].grad[:, 66] == 8).all()
        assert not leaves[2].grad[:, :66].any()


@pytest.mark.parametrize("sink", [-INF, -1e4, 0.0, 30.0, 1e4])
def test_extreme_sinks(sink, device, needs):
    case = Case(causal=True, sq=60, sk=40)
    x = make_inputs(case, device)
    with needs("sinks"):
        s_aux = torch.full((case.h,), sink, device=device)
        out, lse = flash_attn_func(x.q, x.k, x.v, causal=True, s_aux=s_aux, return_lse=True)
        ref, ref_lse, _ = attention_ref(x.q, x.k, x.v, causal=True, s_aux=s_aux)
        std, _, _ = standard_attention(x.q, x.k, x.v, causal=True, s_aux=s_aux)
        assert_accurate("out", out, ref, std)
        assert_lse("lse", lse, ref_lse)
        assert not out[:, :20].any()
        if sink == -INF:
            assert_bitwise("no sink", out, flash_attn_func(x.q, x.k, x.v, causal=True))


@pytest.mark.parametrize("sinks_dtype", [BF16, FP32])
def test_sinks_without_a_single_key(sinks_dtype, device, needs):
    x = make_inputs(Case(sk=0, layout="contiguous"), device)
    with needs("sinks", "backward"):
        s_aux = torch.randn(4, device=device).to(sinks_dtype).requires_grad_()
        out, lse = flash_attn_func(x.q, x.k, x.v, s_aux=s_aux, return_lse=True)
        assert not out.any()
        assert_within("lse", lse, s_aux[None, :, None].float().expand_as(lse), 1e-3)
        lse.sum().backward()
        assert s_aux.grad.dtype == sinks_dtype
        rows = torch.full_like(s_aux.float(), float(x.q.shape[0] * x.q.shape[1]))
        assert_within("ds_aux", s_aux.grad.float(), rows, 1.0 if sinks_dtype == BF16 else 1e-3)


@pytest.mark.parametrize("slope", [0.0, 50.0, -0.05])
def test_extreme_alibi_slopes(slope, device, needs):
    x = make_inputs(Case(sq=60, sk=90), device)
    slopes = torch.full((4,), slope, device=device)
    with needs("alibi"):
        out = flash_attn_func(x.q, x.k, x.v, alibi_slopes=slopes)
        ref, _, _ = attention_ref(x.q, x.k, x.v, alibi_slopes=slopes)
        std, _, _ = standard_attention(x.q, x.k, x.v, alibi_slopes=slopes)
        assert_accurate("out", out, ref, std)


@pytest.mark.parametrize("dropout_p", [1e-6, 0.999])
def test_extreme_dropout(dropout_p, device, needs):
    case = Case(dropout_p=dropout_p, dtype=FP32)
    with needs("dropout", "backward", "fp32"):
        check_backward(case, make_inputs(case, device))


@pytest.mark.parametrize(
    "case",
    [
        Case(b=1, sq=1, sk=1, h=1, hk=1, d=1, layout="contiguous"),
        Case(b=1, sq=1, sk=1, h=1, hk=1, d=8, causal=True),
        Case(b=1, sq=2, sk=1, h=1, hk=1, d=8, causal=True),
        Case(b=1, sq=300, sk=1, h=5, hk=1, d=64, window=(0, 0)),
        Case(b=1, sq=1, sk=300, h=5, hk=1, d=64, window=(0, 0)),
        Case(b=7, sq=1, sk=65, h=8, hk=1, d=128),
    ],
    ids=str,
)
def test_degenerate_shapes(case, device, needs):
    check_forward(case, make_inputs(case, device))
    with needs("backward"):
        check_backward(case, make_inputs(case, device))


def test_softcap_saturates_without_nan(device, needs):
    case = Case(softcap=1e-3, kind="large", dtype=FP32)
    with needs("softcap", "backward", "fp32"):
        check_backward(case, make_inputs(case, device))


def test_all_inputs_in_one_overlapping_buffer(device, needs):
    """q, k and v start eight elements apart in the same memory."""
    buffer = torch.randn(1, 40, 2, 80, device=device).to(BF16)
    q, k, v = (buffer[..., n : n + 64] for n in (0, 8, 16))
    out = flash_attn_func(q, k, v)
    assert_accurate("out", out, attention_ref(q, k, v)[0], standard_attention(q, k, v)[0])
    with needs("backward"):
        leaf = buffer.clone().requires_grad_()
        q, k, v = (leaf[..., n : n + 64] for n in (0, 8, 16))
        flash_attn_func(q, k, v).float().sum().backward()
        reference = buffer.double().requires_grad_()
        attention_ref(*(reference[..., n : n + 64] for n in (0, 8, 16)))[0].sum().backward()
        assert_within("gradient", leaf.grad.double(), reference.grad, 0.1)


def test_gradient_of_the_output_with_odd_strides(device, needs):
    case = Case(causal=True)
    x = make_inputs(case, device)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    with needs("backward"):
        out = flash_attn_func(*leaves, causal=True, deterministic=True)
        plain = torch.autograd.grad(out, leaves, x.dout.contiguous(), retain_graph=True)
        last_dim_first = x.dout.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
        every_other = torch.stack([x.dout, x.dout + NAN], dim=-1)[..., 0]
        for odd in (last_dim_first, every_other):
            grads = torch.autograd.grad(out, leaves, odd, retain_graph=True)
            for name, now, expected in zip("qkv", grads, plain, strict=True):
                assert_bitwise(f"d{name}", now, expected)


def test_huge_magnitudes_do_not_overflow_half_precision(device):
    """Scores above 65504 exist only in float32 registers."""
    x = make_inputs(Case(dtype=FP16, sq=40, sk=70, causal=True), device)
    q, k = x.q * 200, x.k * 200
    out = flash_attn_func(q, k, x.v, causal=True)
    assert torch.isfinite(out).all()
    assert not out[:, :0].any()
    ref, _, _ = attention_ref(q, k, x.v, causal=True)
    assert_within("out", out.double(), ref, 0.02)


def test_first_call_under_no_grad_then_training(device, needs):
    x = make_inputs(Case(), device)
    q = x.q.detach().requires_grad_()
    with torch.no_grad():
        assert not flash_attn_func(q, x.k, x.v).requires_grad
    with torch.inference_mode():
        flash_attn_func(x.q, x.k, x.v)
    out = flash_attn_func(q, x.k, x.v)
    assert out.requires_grad
    with needs("backward"):
        out.float().sum().backward()
        assert q.grad.any()


def test_sequences_do_not_leak_into_each_other(device, needs):
    """Changing one packed sequence changes no bit of its neighbours, nor of their gradients."""
    x = pack(Case(causal=True), LENGTHS["mixed"], device)
    rows = slice(x.cu_q[1], x.cu_q[2])

    def run(q, k, v):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = flash_attn_varlen_func(*leaves, **x.lengths, causal=True, deterministic=True)
        return out, leaves

    first, first_leaves = run(x.q, x.k, x.v)
    for t in (x.q, x.k, x.v):
        t[rows] = NAN
    second, second_leaves = run(x.q, x.k, x.v)
    others = torch.ones(x.q.shape[0], dtype=torch.bool, device=device)
    others[rows] = False
    assert_bitwise("out", second[others].detach(), first[others].detach())
    assert torch.isnan(second[rows]).all()
    with needs("backward"):
        first.backward(x.dout)
        second.backward(x.dout)
        for a, b in zip(first_leaves, second_leaves, strict=True):
            assert_bitwise("gradient", b.grad[others], a.grad[others])


def test_cache_with_zero_strides_between_heads(device, needs):
    """A read-only call may take an expanded cache."""
    q = torch.randn(2, 1, 4, 64, device=device).to(BF16)
    one = torch.randn(2, 50, 1, 64, device=device).to(BF16)
    with needs("kvcache"):
        out = flash_attn_with_kvcache(q, one.expand(-1, -1, 4, -1), one.expand(-1, -1, 4, -1),
                                      cache_seqlens=33)  # fmt: skip
        k = one[:, :33]
        assert_accurate("out", out, attention_ref(q, k, k)[0], standard_attention(q, k, k)[0])
