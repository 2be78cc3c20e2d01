"""return_max_logits: the largest score of each head, or of each row, as it enters the softmax."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from cases import BF16, FP16, FP32, FP64, Case, make_inputs
from compare import assert_bitwise, assert_within, largest
from packed_cases import in_pages
from reference import max_logits_ref, varlen_ref

import flash_attn


def assert_logits(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    """But for the rounding of a product that is summed in float32."""
    assert not ours.requires_grad
    size = float(largest(expected)) if expected.numel() else 0.0
    assert_within(name, ours, expected, 1e-5 + 3e-6 * size)


CASES = [
    Case(causal=True),
    Case(FP16, sq=300, sk=700),
    Case(sq=200, sk=90, causal=True),  # the first rows see nothing
    Case(sq=5, sk=0),
    Case(sq=0, sk=5),
    Case(b=0),
    Case(sq=1, sk=300, h=8, hk=1),  # few rows, which would be decoded
    Case(window=(20, 3), sk=333),
    Case(softcap=3.0, sk=260),
    Case(alibi="bh", sk=300),
    Case(alibi="h", causal=True, sk=300),
    Case(sinks=True, causal=True, sq=150),
    Case(dropout_p=0.3),
    Case(scale=-0.7, sk=400),
    Case(scale=0.0),
    Case(softcap=20.0, alibi="bh", sinks=True, dropout_p=0.17, window=(50, 3), sk=170),
    *(Case(kind=kind, sk=500) for kind in ("low_rank", "outliers", "large", "constant", "growing")),
    Case(d=256, sk=300),
    Case(d=128, dv=64, sk=400),
    Case(d=30, sk=200),
    Case(FP32, causal=True),
    Case(FP64, causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense(case, device, needs):
    x = make_inputs(case, device)
    options = case.mask_kwargs() | x.scores_kwargs() | {"softcap": case.softcap}
    options["softmax_scale"] = case.scale
    drops = {"dropout_p": case.dropout_p}
    with needs(*case.features):
        out, lse, rows = flash_attn.flash_attn_func(
            x.q, x.k, x.v, return_lse=True, return_max_logits="row", **options, **drops
        )
        assert out.shape == (*x.q.shape[:3], x.v.shape[-1])
        assert rows.shape == lse.shape
        assert rows.dtype == lse.dtype
        _, expected, _ = max_logits_ref(x.q, x.k, x.v, **options)
        assert_logits("rows", rows, expected)
        _, heads = flash_attn.flash_attn_func(
            x.q, x.k, x.v, return_max_logits=True, **options, **drops
        )
        assert heads.shape == (case.h,)
        of_heads = rows.amax((0, 2)) if rows.numel() else rows.new_full((case.h,), -torch.inf)
        assert_bitwise("heads", heads, of_heads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("highest", [-0.5, 0.0, 0.5, -20.0])
def test_slowly_rising_scores(causal, highest, device):
    """From key block to key block by less than what moves the maximum that the softmax keeps, in
    either order of blocks, and below and above 0."""
    keys = 1200
    steps = torch.linspace(highest - 4, highest, keys, device=device)
    q = torch.zeros(1, 200, 2, 64, device=device, dtype=BF16)
    q[..., 0] = 1
    k = torch.zeros(1, keys, 2, 64, device=device, dtype=BF16)
    k[0, :, 0, 0], k[0, :, 1, 0] = steps, steps.flip(0)
    options = {"softmax_scale": 1.0, "causal": causal}
    _, rows = flash_attn.flash_attn_func(q, k, k, return_max_logits="row", **options)
    assert_bitwise("rows", rows, max_logits_ref(q, k, k, **options)[1].float())


LENGTHS = [0, 150, 3, 0, 60], [10, 70, 200, 5, 0]


def packed(device: str):
    """q, k and v, with rows behind the last sequence; where sequences of q and of k end."""
    cu_q, cu_k = (
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        for n in LENGTHS
    )
    q = torch.randn(220, 4, 64, device=device).to(BF16)
    k, v = torch.randn(2, 290, 2, 64, device=device).to(BF16)
    q[cu_q[-1] :] = k[cu_k[-1] :] = v[cu_k[-1] :] = float("nan")
    return q, k, v, cu_q, cu_k


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 4.0, "causal": True}])
def test_packed(options, device, needs):
    q, k, v, cu_q, cu_k = packed(device)
    with needs(*(name for name in options if name == "softcap")):
        _, lse, rows = flash_attn.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 150, 200, return_softmax_lse=True, return_max_logits="row",
            **options,
        )  # fmt: skip
        assert rows.shape == lse.shape
        ends = cu_q.tolist(), cu_k.tolist()
        assert_logits("rows", rows, varlen_ref(max_logits_ref, q, k, v, *ends, **options)[1])
        _, heads = flash_attn.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 150, 200, return_max_logits=True, **options
        )
        assert_bitwise("heads", heads, rows.amax(1))


@pytest.mark.parametrize("page_size", [16, 5])
def test_pages(page_size, device, needs):
    q, k, v, cu_q, cu_k = packed(device)
    longest, ends = max(LENGTHS[1]), cu_k.tolist()
    table, k_pages, v_pages = in_pages(ends, page_size, k, v)
    with needs("paged"):
        rows, heads = (
            flash_attn.flash_attn_varlen_func(
                q,
                k_pages,
                v_pages,
                cu_q,
                cu_k,
                150,
                longest,
                causal=True,
                block_table=table,
                return_max_logits=wanted,
            )[1]
            for wanted in ("row", True)
        )
        assert_bitwise("heads", heads, rows.amax(1))
        expected = varlen_ref(max_logits_ref, q, k, v, cu_q.tolist(), ends, causal=True)[1]
        assert_logits("rows", rows, expected)


def test_tensors_in_one(device):
    qkv = torch.randn(2, 90, 3, 4, 64, device=device).to(BF16)
    flat, ends = qkv.flatten(0, 1), torch.tensor([0, 90, 180], dtype=torch.int32, device=device)
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    expected = flash_attn.flash_attn_func(*qkv.unbind(2), return_max_logits=True)[1]
    lengths = (ends, ends, 90, 90)
    for result in (
        flash_attn.flash_attn_qkvpacked_func(qkv, return_max_logits=True),
        flash_attn.flash_attn_kvpacked_func(q, kv, return_max_logits=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(flat, ends, 90, return_max_logits=True),
        flash_attn.flash_attn_varlen_kvpacked_func(
            q.flatten(0, 1), kv.flatten(0, 1), *lengths, return_max_logits=True
        ),
    ):
        assert_within("heads", result[1], expected, 1e-5)


def test_the_gradient_is_that_of_a_call_without(device, needs):
    inputs = [torch.randn(1, 150, 2, 64, device=device).to(BF16).requires_grad_() for _ in "qkv"]
    with needs("backward"):
        out, lse, heads = flash_attn.flash_attn_func(
            *inputs, return_lse=True, return_max_logits=True
        )
        assert not heads.requires_grad
        grads = torch.autograd.grad(out.sum() + lse.sum(), inputs)
        out, lse = flash_attn.flash_attn_func(*inputs, return_lse=True)
        for ours, plain in zip(grads, torch.autograd.grad(out.sum() + lse.sum(), inputs)):
            assert_within("gradient", ours, plain, 0.02 * float(largest(plain)))


@pytest.mark.parametrize("wanted", [True, "row"])
def test_compiled(wanted, device):
    if device != "cuda":
        device = "cpu"
    q, k, v = (torch.randn(2, 40, 2, 64, device=device).requires_grad_() for _ in "qkv")
    if device == "cuda":
        q, k, v = (x.detach().to(BF16).requires_grad_() for x in (q, k, v))

    def call(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, causal=True, return_max_logits=wanted)

    torch._dynamo.reset()
    out, logits = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    out.sum().backward()
    assert q.grad is not None
    assert_bitwise("logits", logits, call(q, k, v)[1])


@pytest.mark.parametrize("of_heads", [False, True])
def test_the_operation(of_heads, device):
    """Its fake implementation has the shapes; the largest logits come in S_dmask's place."""
    q = torch.randn(2, 20, 2, 64, device=device).to(BF16)
    args = (q, q, q, 0.0, 0.125, True, -1, -1, 0.0, None, False)
    options = {"return_max_logits": True, "max_logits_of_heads": of_heads}
    torch.library.opcheck(
        torch.ops.flash_attn._flash_attn_forward.default, args, options,
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    _, lse, logits, _ = torch.ops.flash_attn._flash_attn_forward(*args, **options)
    assert logits.shape == ((2,) if of_heads else lse.shape)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_extreme_scores(value, packs, device):
    """In one head, at one key: NaN is larger than all, and rows that do not see it have none."""
    q, k, v = torch.randn(3, 300, 2, 64, device=device).to(BF16)
    q[..., 0] = 1.0
    k[:, 1] = 0.0
    k[77, 1, 0] = value
    options = {"causal": True, "return_max_logits": "row"}
    if packs:
        ends = torch.tensor([0, 300], dtype=torch.int32, device=device)
        call = functools.partial(flash_attn.flash_attn_varlen_func, q, k, v, ends, ends, 300, 300)
    else:
        call = functools.partial(flash_attn.flash_attn_func, q[None], k[None], v[None])
    rows, heads = (call(**options | {"return_max_logits": of})[1] for of in ("row", True))
    rows = rows if packs else rows[0]
    seen = torch.full((300,), 0.0, device=device)
    if value != -math.inf:
        seen[77:] = value
    assert_within("rows", rows[1], seen, 0.0)
    assert rows[0].isfinite().all()
    assert_bitwise("heads", heads, rows.amax(1))


def test_batch_invariant(device, needs):
    x = make_inputs(Case(b=3, causal=True), device)
    with needs("batch_invariant"):
        _, rows = flash_attn.flash_attn_func(
            x.q, x.k, x.v, causal=True, batch_invariant=True, return_max_logits="row"
        )
        assert_logits("rows", rows, max_logits_ref(x.q, x.k, x.v, causal=True)[1])


@pytest.mark.parametrize("wanted", ["rows", 1, None, "head"])
def test_what_is_wanted_is_checked(wanted, device):
    q = torch.randn(1, 8, 2, 64, device=device).to(BF16)
    said = rf"return_max_logits: got {wanted!r}; True, False or \"row\" is needed"
    with pytest.raises(TypeError, match=said):
        flash_attn.flash_attn_func(q, q, q, return_max_logits=wanted)


def test_not_with_probabilities(device):
    q = torch.randn(1, 8, 2, 64, device=device).to(BF16)
    with pytest.raises(ValueError, match="return_max_logits: got True with return_attn_probs"):
        flash_attn.flash_attn_func(q, q, q, return_attn_probs=True, return_max_logits=True)


def test_explain():
    q = torch.zeros(1, 8, 2, 64)
    choice = flash_attn.explain(q, q, q, return_max_logits=True)
    assert "max_logits" in choice.call
    assert "has no max_logits" in choice.slow[0]
    assert not flash_attn.explain(q, q, q, return_max_logits=True, backward=True).slow
