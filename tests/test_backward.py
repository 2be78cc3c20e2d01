"""Gradients of the dense call: q, k, v, the sinks, and through the log-sum-exp."""

from __future__ import annotations

import pytest
import torch
from calls import check_backward, check_gradients, dense, differentiable, written_out
from cases import (
    BACKWARD_CASES,
    BF16,
    FP16,
    FP32,
    FP64,
    PLAIN_CASES,
    Case,
    make_inputs,
    random_case,
)
from compare import assert_bitwise
from reference import attention_ref, gradients, standard_attention

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_plain_gradients(case, device, needs):
    with needs("backward"):
        check_backward(case, make_inputs(case, device), with_dlse=False)


@pytest.mark.parametrize("case", BACKWARD_CASES, ids=str)
def test_gradients(case, device, needs):
    with needs("backward", *case.features):
        check_backward(case, make_inputs(case, device), with_dlse=case.seed % 2 == 0)


@pytest.mark.parametrize(
    "case",
    [
        Case(b=1, sq=513, sk=513, h=2, hk=1, causal=True),
        Case(b=1, sq=257, sk=700, h=2, hk=2, window=(100, 30), dtype=FP16, kind="outliers"),
        Case(b=1, sq=600, sk=129, h=2, hk=1, causal=True, kind="low_rank", dropout_p=0.2),
        Case(b=1, sq=130, sk=200, h=2, hk=1, d=256),
        Case(FP32, b=1, sq=2100, sk=2100, h=1, hk=1, d=16, causal=True),
        Case(b=2, sq=300, sk=400, h=4, hk=2, sinks=True, alibi="bh", causal=True),
    ],
    ids=str,
)
def test_several_tiles(case, device, needs):
    with needs("backward", *case.features):
        check_backward(case, make_inputs(case, device), with_dlse=False)


@pytest.mark.parametrize("dropout_p", [0.5, 0.6])  # Hopper compares bits in pairs up to one half
@pytest.mark.parametrize("d", [64, 128])
def test_much_dropout(d, dropout_p, device, needs):
    case = Case(sq=150, sk=200, d=d, causal=True, dropout_p=dropout_p)
    with needs("backward", *case.features):
        check_backward(case, make_inputs(case, device), with_dlse=False)


@pytest.mark.parametrize("seed", range(100, 130))
def test_random(seed, device, needs):
    case = random_case(seed)
    with needs("backward", *case.features):
        check_backward(case, make_inputs(case, device), with_dlse=seed % 3 == 0)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("alibi", [None, "bh"])
@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (2, 1))])
def test_gradcheck(sinks, softcap, alibi, causal, window, device, needs):
    """Finite differences in float64: no formula of ours or of torch's on the other side."""
    case = Case(
        FP64, 1, 5, 7, 2, 1, 4, 3, causal, window, None, softcap, alibi, sinks=sinks, dropout_p=0.4
    )
    x = make_inputs(case, device)
    inputs = differentiable(x)
    with needs("backward", *case.features):
        leaves = [t.detach().double().requires_grad_() for t in inputs.values()]
        torch.autograd.gradcheck(
            lambda *args: dense(case, x, *args), leaves, eps=1e-6, atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("wanted", ["q", "k", "v", "s_aux", "q,v", "k,s_aux"])
def test_only_the_gradients_asked_for(wanted, device, needs):
    case = Case(sinks=True, causal=True, dtype=FP32)
    x = make_inputs(case, device)
    with needs("backward", *case.features):
        _, _, everything = gradients(
            lambda **leaves: dense(case, x, **leaves), differentiable(x), x.dout
        )
        leaves = {
            name: t.detach().clone().requires_grad_(name in wanted.split(","))
            for name, t in differentiable(x).items()
        }
        out, _ = dense(case, x, **leaves)
        out.backward(x.dout)
        for name, leaf in leaves.items():
            if name in wanted.split(","):
                torch.testing.assert_close(leaf.grad, everything[name])
            else:
                assert leaf.grad is None, name


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradient_through_lse_alone(dtype, device, needs):
    case = Case(dtype=dtype, causal=True, sq=70, sk=50)  # the first 20 rows see nothing
    x = make_inputs(case, device)
    with needs("backward", *case.features):
        check_gradients(
            lambda **leaves: dense(case, x, **leaves),
            written_out(case, x, attention_ref),
            written_out(case, x, standard_attention),
            differentiable(x),
            torch.zeros_like(x.dout),
            x.dlse,
        )


def test_sum_of_the_output(device, needs):
    """`out.sum().backward()` passes a gradient whose strides are all zero."""
    case = Case()
    x = make_inputs(case, device)
    with needs("backward"):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        flash_attn_func(*leaves).sum().backward()
        ones = torch.ones_like(x.dout)
        _, _, grads = gradients(
            lambda q, k, v: written_out(case, x, attention_ref)(q, k, v),
            {"q": x.q, "k": x.k, "v": x.v},
            ones,
            dtype=FP64,
        )
        for leaf, ref in zip(leaves, grads.values(), strict=True):
            torch.testing.assert_close(leaf.grad.double(), ref, atol=0.05, rtol=0.02)


def test_one_tensor_as_q_k_and_v(device, needs):
    x = torch.randn(2, 60, 3, 32, device=device).to(BF16)
    with needs("backward"):
        check_gradients(
            lambda x: flash_attn_func(x, x, x, causal=True, return_lse=True),
            lambda x: attention_ref(x, x, x, causal=True)[:2],
            lambda x: standard_attention(x, x, x, causal=True)[:2],
            {"x": x},
            torch.randn_like(x),
        )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_no_query_heads(packed, head_dim, device, needs):
    """Nothing is attended to, so the keys' gradients are zeros."""
    q, k, v = (
        torch.randn(2, 80, heads, head_dim, device=device).to(BF16).requires_grad_()
        for heads in (0, 1, 1)
    )
    with needs("backward"):
        if packed:
            ends = torch.tensor([0, 80, 160], dtype=torch.int32, device=device)
            flat = (x.flatten(0, 1) for x in (q, k, v))
            out = flash_attn_varlen_func(*flat, ends, ends, 80, 80)
        else:
            out = flash_attn_func(q, k, v)
        out.sum().backward()
        assert q.grad.shape == q.shape
        assert not k.grad.any()
        assert not v.grad.any()


@pytest.mark.parametrize("causal", [False, True])
def test_packed_gradients_equal_unpacked(causal, device, needs):
    qkv = torch.randn(2, 113, 3, 4, 64, device=device).to(BF16)
    kv = torch.randn(2, 150, 2, 2, 64, device=device).to(BF16)
    dout = torch.randn(2, 113, 4, 64, device=device).to(BF16)
    with needs("backward"):
        leaf = qkv.clone().requires_grad_()
        flash_attn_qkvpacked_func(leaf, causal=causal, deterministic=True).backward(dout)
        three = [t.clone().requires_grad_() for t in qkv.unbind(2)]
        flash_attn_func(*three, causal=causal, deterministic=True).backward(dout)
        assert_bitwise("dqkv", leaf.grad, torch.stack([t.grad for t in three], dim=2))

        q, leaf = qkv[:, :, 0].clone().requires_grad_(), kv.clone().requires_grad_()
        flash_attn_kvpacked_func(q, leaf, causal=causal, deterministic=True).backward(dout)
        three = [t.clone().requires_grad_() for t in (qkv[:, :, 0], *kv.unbind(2))]
        flash_attn_func(*three, causal=causal, deterministic=True).backward(dout)
        assert_bitwise("dq", q.grad, three[0].grad)
        assert_bitwise("dkv", leaf.grad, torch.stack([t.grad for t in three[1:]], dim=2))


@pytest.mark.parametrize("packed", ["qkv", "kv"])
def test_packed_gradients_of_inputs_that_were_offloaded(packed, device, needs):
    """Saved copies are no longer neighbours in memory; the packed gradient must not assume it."""
    qkv = torch.randn(2, 40, 3, 4, 32, device=device).to(BF16)
    dout = torch.randn(2, 40, 4, 32, device=device).to(BF16)

    def gradient():
        leaf = qkv.clone().requires_grad_()
        if packed == "qkv":
            out = flash_attn_qkvpacked_func(leaf, causal=True, deterministic=True)
        else:
            q, kv = leaf[:, :, 0], leaf[:, :, 1:]
            out = flash_attn_kvpacked_func(q, kv, causal=True, deterministic=True)
        out.backward(dout)
        return leaf.grad

    with needs("backward"):
        expected = gradient()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            assert_bitwise("gradient", gradient(), expected)


def test_backward_twice_through_one_graph(device, needs):
    x = make_inputs(Case(causal=True), device)
    q = x.q.detach().requires_grad_()
    out = flash_attn_func(q, x.k, x.v, causal=True, deterministic=True)
    with needs("backward"):
        first = torch.autograd.grad(out, q, x.dout, retain_graph=True)[0]
        second = torch.autograd.grad(out, q, x.dout)[0]
        assert_bitwise("dq", second, first)


def test_backward_leaves_its_inputs_alone(device, needs):
    x = make_inputs(Case(causal=True, layout="packed"), device)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out = flash_attn_func(*leaves, causal=True)
    kept = [t.detach().clone() for t in (*leaves, out, x.dout)]
    with needs("backward"):
        torch.autograd.grad(out, leaves, x.dout)
        for name, now, then in zip(
            ["q", "k", "v", "out", "dout"], (*leaves, out, x.dout), kept, strict=True
        ):
            assert_bitwise(name, now.detach(), then)
