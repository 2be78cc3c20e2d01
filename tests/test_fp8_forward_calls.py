"""Calls whose q, k and v are codes: what is refused, compilers, gradients, kernels, FA3's names."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP16, Case
from coded_cases import (
    HK,
    KINDS,
    B,
    D,
    H,
    S,
    call_of,
    dense_of,
    make_coded,
    pack_coded,
    packed_of,
    pages_of,
)
from compare import assert_bitwise
from fp8_cases import FP8, codes, moved
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import flash_attn
import flash_attn_interface as fa3
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.call import AllDescales, CodedForward, Keys, Lengths, Scoring, named
from flash_attn.dispatch import fp8, private

OPERATION = torch.ops.flash_attn._flash_attn_fp8_forward


# --- What is refused ------------------------------------------------------------------------------

BFLOAT = {name: torch.randn(B, S, heads, D).to(BF16) for name, heads in (("q", H), ("k", HK))}
REFUSED = {
    "q alone": ({"k": BFLOAT["k"], "v": BFLOAT["k"]}, r"k: got dtype torch.bfloat16; it must be"),
    "v in 16 bits": ({"v": BFLOAT["k"]}, r"v: got dtype torch.bfloat16; it must be that of q"),
    "k and v alone": ({"q": BFLOAT["q"]}, "codes are read from a KV cache, by flash_attn_with"),
    "another format": (
        {"v": torch.zeros(B, S, HK, D).to(torch.float8_e5m2)}, "v: got dtype torch.float8_e5m2"
    ),
    "zero": ({"q_descale": 0.0}, r"q_descale: got 0.0; a positive number \(of float32\)"),
    "nan": ({"v_descale": float("nan")}, "v_descale: got nan; a positive number"),
    "half": ({"k_descale": torch.ones(B, HK, dtype=BF16)}, "k_descale: got dtype torch.bfloat16"),
    "heads of q": (
        {"q_descale": torch.ones(B, H)},
        r"q_descale: got shape \(2, 4\); \(batch, heads_k\) = \(2, 2\) \(call .expand\) is needed",
    ),
    "rows": ({"k_descale": torch.ones(B, S, HK)}, r"k_descale: got shape \(2, 9, 2\); \(batch"),
    "a scalar": ({"v_descale": torch.ones(())}, r"v_descale: got shape \(\)"),
    "out_dtype": (
        {"out_dtype": torch.float32},
        r"out_dtype: got torch.float32; accepted are torch.bfloat16, torch.float16",
    ),
    "keys": ({"k": torch.zeros(B, S, 3, D).to(FP8)}, "v: got shape"),
    "strides": (
        {"q": torch.zeros(B, S, D, H).to(FP8).transpose(2, 3)}, r"q: got strides .*must be 1"
    ),
    "head_dim": (
        {"q": torch.zeros(B, S, H, 16).to(FP8)}, r"k: got head_dim 32 .* must be that of q, 16"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, device):
    changes, said = REFUSED[name]
    call = dense_of(device) | {key: moved(x, device) for key, x in changes.items()}
    with pytest.raises(ValueError, match=said):
        flash_attn_func(**call)


@pytest.mark.parametrize(
    "option",
    [{"dropout_p": 0.1}, {"return_attn_probs": True}, {"return_max_logits": True},
     {"return_max_logits": "row"}],
    ids=str,
)  # fmt: skip
def test_options_that_codes_do_not_have(option, device):
    (name,) = option
    said = rf"^{name}: got .*; attention of codes \(.*\) has none: convert q, k and v"
    with pytest.raises(NotImplementedError, match=said):
        flash_attn_func(**dense_of(device), **option)
    with pytest.raises(NotImplementedError, match=said):
        flash_attn_varlen_func(**packed_of(device), **option)


@pytest.mark.parametrize(
    "given",
    [{"q_descale": 0.5}, {"q_descale": torch.ones(B, HK)}, {"out_dtype": FP16},
     {"fp8_products": True}],
    ids=str,
)  # fmt: skip
def test_what_16_bits_do_not_have(given, device):
    (name,) = given
    given = {name: moved(x, device) for name, x in given.items()}
    q = torch.zeros(B, S, HK, D, device=device, dtype=BF16)
    with pytest.raises(ValueError, match=rf"^{name}: got .* with a q of torch.bfloat16; it is for"):
        flash_attn_func(q, q, q, **given)
    pages = pages_of(device)
    pages["q"] = pages["q"].to(BF16)
    if name != "fp8_products":  # which permits to round q beside pages of codes
        with pytest.raises(ValueError, match=rf"^{name}: got .* with a q of torch.bfloat16"):
            flash_attn_varlen_func(**pages, **given)
    with pytest.raises(ValueError, match="v_descale: got one with a v of"):
        flash_attn_func(q, q, q, v_descale=2.0)


def test_packed_tensors_are_sliced_by_the_caller(device):
    qkv = codes(device, B, S, 3, HK, D)
    said = r"^qkv: got dtype .*; codes are taken by flash_attn_func and flash_attn_varlen_func, of"
    with pytest.raises(ValueError, match=said):
        flash_attn.flash_attn_qkvpacked_func(qkv)
    with pytest.raises(ValueError, match=said.replace("qkv", "q")):
        flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:])


def test_no_gradient(device):
    """Of what codes are made from, and of sinks; descales are constants."""
    call = dense_of(device)
    descale = torch.ones(B, HK, device=device, requires_grad=True)
    assert not flash_attn_func(**call, v_descale=descale).requires_grad
    sinks = torch.zeros(H, device=device, requires_grad=True)
    for name in ("q", "k", "v"):
        wanted = torch.randn_like(call[name].float()).requires_grad_().to(FP8)
        with pytest.raises(RuntimeError, match=rf"^{name}: requires_grad is set; attention of"):
            flash_attn_func(**call | {name: wanted})
        with torch.no_grad():
            flash_attn_func(**call | {name: wanted})
    with pytest.raises(RuntimeError, match="s_aux: requires_grad is set"):
        flash_attn_func(**call, s_aux=sinks)


def test_contents_are_looked_at():
    call = packed_of("cpu")
    call["cu_seqlens_k"] = torch.tensor([0, 5, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[\d\]: got \d+ after"):
        flash_attn_varlen_func(**call)
    pages = pages_of("cpu")
    pages["block_table"][0, 0] = 4
    with pytest.raises(ValueError, match=r"block_table\[0\]: got page 4"):
        flash_attn_varlen_func(**pages)


# --- The operation --------------------------------------------------------------------------------


def test_a_call_comes_back():
    """What is spelled out for the operation is what it takes it for."""
    scoring = Scoring(0.0, 0.5, True, 3, 4, 5.0, "alibi_slopes", "s_aux")
    lengths, keys = Lengths("cu_q", "cu_k", 6, 7), Keys("block_table", None, "seqused_k")
    descales = AllDescales("q_descale", None, "v_descale", 1.0, 2.0, 3.0)
    call = CodedForward("q", "k", "v", scoring, lengths, keys, True, 8, descales, True)
    back = CodedForward.of(named(OPERATION.default._schema)(call.in_order(), {}))
    assert back == call
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 5, 3, 4)
    dense = CodedForward(q, k, k, scoring)
    assert dense.in_order()[3:9] == (None, None, None, None, 2, 5)
    back = CodedForward.of(named(OPERATION.default._schema)(dense.in_order(), {}))
    assert back.lengths is None
    assert back.scoring == scoring


@pytest.mark.parametrize("inputs", [dense_of, packed_of, pages_of], ids=lambda x: x.__name__)
@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_opcheck(inputs, kind, device):
    heads = torch.tensor([[0.5, 1.0], [2.0, 4.0]], device=device)
    descales = AllDescales(heads, heads.t(), None) if kind == "tensors" else AllDescales()
    call = call_of(inputs(device), descales=descales, fp16_out=kind == "tensors")
    if fp8._on_gpu(call.q) and not (fp8.has_kernel and fp8.is_hopper(call.q.device)):
        pytest.skip("this GPU has no kernel of the operation")
    opcheck(
        OPERATION.default,
        call.in_order(),
        test_utils=(
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
    )


@pytest.mark.parametrize("kind", ["none", "number", "tensor"])
@pytest.mark.parametrize("way", ["operation", "ordinary"])
def test_compiled(kind, way, device, monkeypatch):
    if way == "ordinary":
        monkeypatch.setattr(fp8, "forward", fp8.by_ordinary_forward)
    descale = {"none": None, "number": 0.5, "tensor": torch.full((B, HK), 0.5, device=device)}[kind]
    torch._dynamo.reset()

    def dense(call, descale):
        return flash_attn_func(
            **call, q_descale=descale, v_descale=descale, causal=True, return_lse=True
        )

    def packed(call, descale):
        return flash_attn_varlen_func(**call, k_descale=descale, v_descale=descale, causal=True)

    for function, call in (
        (dense, dense_of(device)), (packed, packed_of(device)), (packed, pages_of(device))
    ):  # fmt: skip
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(call, descale), function(call, descale))


def test_tensors_without_data():
    """Of a GPU, too, whose kernels write whole chunks of 8."""
    out, lse = OPERATION(*call_of(dense_of("meta")).in_order())
    assert (out.shape, out.dtype, lse.shape) == ((B, S, H, D), BF16, (B, H, S))
    call = dense_of("meta")
    call["k"] = codes("cpu", B, S, HK, D)
    with pytest.raises(ValueError, match="k: got device cpu; it must be that of q, meta"):
        OPERATION(*call_of(call).in_order())
    with FakeTensorMode():
        q = torch.empty(B, S, H, 41, dtype=FP8, device="cuda")
        out, lse = OPERATION(*call_of({"q": q, "k": q, "v": q}, fp16_out=True).in_order())
        assert (out.shape, out.dtype, lse.dtype) == ((B, S, H, 48), FP16, torch.float32)


def test_explained():
    for inputs, function in ((dense_of, flash_attn_func), (packed_of, flash_attn_varlen_func)):
        said = flash_attn.explain_call(function, **inputs("cpu"), q_descale=0.5, out_dtype=FP16)
        assert said.operation == "_flash_attn_fp8_forward"
        assert "as float16" not in said.call  # a CPU computes in float32


# --- Private functions, FA3's names ---------------------------------------------------------------


def test_private_functions(device):
    call = packed_of(device)
    public, lse = flash_attn_varlen_func(**call, causal=True, k_descale=0.5, return_lse=True)
    out, our_lse, probs, rng_state = private._flash_attn_varlen_forward(
        **call, dropout_p=0.0, softmax_scale=D**-0.5, causal=True, k_descale=0.5
    )
    assert_bitwise("out", out, public)
    assert_bitwise("lse", our_lse, lse)
    assert probs.numel() == rng_state.numel() == 0
    q = torch.zeros(B, S, H, D).to(FP8)
    with pytest.raises(ValueError, match=r"q: got dtype .*; accepted on"):
        private._flash_attn_backward(
            q, q, q, q, q, q, None, None, None, 0.0, 1.0, False, -1, -1, 0.0, None, False
        )


@pytest.mark.parametrize("kind", KINDS)
def test_fa3(kind, device):
    _, coded = make_coded(Case(sq=20, sk=30), kind, device)
    out, lse = flash_attn_func(**coded.codes, **coded.descales, causal=True, return_lse=True)
    ours, our_lse = fa3.flash_attn_func(
        **coded.codes, **coded.descales, causal=True, return_attn_probs=True
    )
    assert_bitwise("out", ours, out)
    assert_bitwise("lse", our_lse, lse)
    buffer = torch.empty_like(out, dtype=FP16)
    assert fa3.flash_attn_func(**coded.codes, **coded.descales, out=buffer) is buffer
    half = flash_attn_func(**coded.codes, **coded.descales, out_dtype=FP16)
    assert_bitwise("out", buffer, half)
    with pytest.raises(ValueError, match=r"out: got torch.float32"):
        fa3.flash_attn_func(**coded.codes, out=buffer.float())
    k, v = coded.codes["k"], coded.codes["v"]
    cached = fa3.flash_attn_with_kvcache(coded.codes["q"], k, v, **coded.descales, causal=True)
    torch.testing.assert_close(cached, out, atol=1e-2, rtol=1e-2)
    if kind != "mixed":
        args = {name: x for name, x in coded.descales.items() if isinstance(x, Tensor)}
        fwd, *_ = torch.ops.flash_attn_3.fwd(*coded.codes.values(), is_causal=True, **args)
        if kind != "number":
            assert_bitwise("out", fwd, out)


@pytest.mark.parametrize("kind", KINDS)
def test_fa3_packed(kind, device):
    x, coded = pack_coded(Case(), ([5, 1, 8], [9, 4, 8]), kind, device)
    out = flash_attn_varlen_func(**coded.codes, **x.lengths, **coded.descales, causal=True)
    ours = fa3.flash_attn_varlen_func(**coded.codes, **x.lengths, **coded.descales, causal=True)
    assert_bitwise("out", ours, out)
    used = torch.tensor([4, 0, 8], dtype=torch.int32, device=device)
    ours = fa3.flash_attn_varlen_func(
        **coded.codes, **x.lengths, **coded.descales, seqused_k=used, causal=True
    )
    assert not ours[5].any()  # a sequence without keys
    assert ours[:5].any()


def test_fa3_qkv_in_one_tensor(device):
    qkv = codes(device, B, S, H + 2 * HK, D)
    descale = torch.rand(B, HK, device=device) + 0.5
    q, k, v = qkv.split([H, HK, HK], 2)
    out = flash_attn_func(q, k, v, q_descale=descale, causal=True)
    ours = fa3.flash_attn_qkvpacked_func(qkv, causal=True, q_descale=descale, num_heads_q=H)
    assert_bitwise("out", ours, out)


def test_fa3_chunks(device):
    """A chunk is a sequence of its own, with the descales of the whole."""
    call, descale = dense_of(device), torch.rand(B, HK, device=device) + 0.5
    given = {"q_descale": descale, "v_descale": descale}
    out = fa3.flash_attn_func(**call, **given, causal=True, attention_chunk=4)
    part = {name: x[:, 4:8] for name, x in call.items()}
    alone = flash_attn_func(**part, **given, causal=True)
    torch.testing.assert_close(out[:, 4:8], alone, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["k", "rotary_cos", "cache_leftpad", "qv"])
def test_fa3_refused(name, device):
    call = dense_of(device)
    given = {name: torch.zeros(B, dtype=torch.int32, device=device)}
    if name == "k":
        given = {"k": call["k"], "v": call["v"]}
    with pytest.raises(NotImplementedError, match=r"^\w+: got "):
        fa3.flash_attn_with_kvcache(call["q"], call["k"], call["v"], **given)


def test_fa3_descale_without_codes(device):
    q = torch.zeros(B, S, HK, D, device=device, dtype=BF16)
    heads = torch.ones(B, HK, device=device)
    for function in (fa3.flash_attn_func, fa3.flash_attn_with_kvcache):
        with pytest.raises(ValueError, match=r"q_descale: got .* with a q of torch.bfloat16"):
            function(q, q, q, q_descale=heads)
    with pytest.raises(ValueError, match="k_descale: got one with a k of"):
        fa3.flash_attn_func(q, q, q, k_descale=heads)
