"""A flag is a bool and a bool is no number, in layers, rotary embedding and the raw calls too.

Those of the public functions of attention are rows of bad_options.py.
"""

from __future__ import annotations

from typing import get_type_hints

import numpy as np
import pytest
import torch

import flash_attn_2_cuda
from flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn.api import checks_scalars
from flash_attn.call import Options
from flash_attn.distributed import merge_attention, packed_layout
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qk,
    apply_rotary_emb_qkv_,
)
from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
)
from flash_attn.ops.rotary import apply_rotary

X = torch.randn(2, 6, 4, 32)
QKV = torch.randn(2, 6, 3, 4, 32)
COS, SIN = torch.ones(16, 16), torch.zeros(16, 16)
TRUE, NO = np.bool_(True), np.bool_(False)


def test_every_flag_of_a_call_is_looked_at():
    """The check lists them twice: what it looks at first has to be what it checks."""
    flags = [name for name, kind in get_type_hints(Options).items() if kind is bool]
    assert len(flags) >= 6
    for name in flags:
        with pytest.raises(TypeError, match=f"^{name}: got 1; True or False is needed"):
            checks_scalars.flags(Options(**{name: 1}))


def raw_forward(**changes):
    options = {
        "dropout_p": 0.0, "softmax_scale": 0.2, "causal": True, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False,
    }  # fmt: skip
    return _flash_attn_forward(X, X, X, **options | changes)


def raw_backward(**changes):
    out, lse, *_ = raw_forward()
    options = {
        "dropout_p": 0.0, "softmax_scale": 0.2, "causal": True, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "deterministic": False,
    }  # fmt: skip
    gradients = (torch.empty_like(X) for _ in range(3))
    return _flash_attn_backward(X, X, X, X, out, lse, *gradients, **options | changes)


FLAGS = [
    (lambda: raw_forward(causal=1), "causal: got 1"),
    (lambda: raw_forward(return_softmax=None), "return_softmax: got None"),
    (lambda: raw_backward(deterministic="x"), "deterministic: got 'x'"),
    (
        lambda: flash_attn_2_cuda.fwd(
            X, X, X, None, None, 0.0, 0.2, 2, -1, -1, 0.0, False, None
        ),
        "causal: got 2",
    ),
    (lambda: apply_rotary_emb(X, COS, SIN, interleaved="neox"), "interleaved: got 'neox'"),
    (lambda: apply_rotary_emb(X, COS, SIN, inplace=1), "inplace: got 1"),
    (lambda: apply_rotary_emb_qk(X, X, COS, SIN, inplace=None), "inplace: got None"),
    (lambda: apply_rotary_emb_qkv_(QKV.clone(), COS, SIN, interleaved=2), "interleaved: got 2"),
    (lambda: apply_rotary_emb_kv_(QKV[:, :, :2].clone(), COS, SIN, "x"), "interleaved: got 'x'"),
    (lambda: apply_rotary(X, COS, SIN, conjugate="x"), "conjugate: got 'x'"),
    (lambda: apply_rotary(X, COS, SIN, inplace="x"), "inplace: got 'x'"),
    (lambda: RotaryEmbedding(32, interleaved="neox"), "interleaved: got 'neox'"),
    (lambda: MHA(64, 4, rotary_emb_dim=8, rotary_emb_interleaved="x"), "interleaved: got 'x'"),
    (lambda: MHA(64, 4, causal=2), "causal: got 2"),
    (lambda: MHA(64, 4, causal=2, use_flash_attn=True), "causal: got 2"),
    (lambda: FlashSelfAttention(causal=None), "causal: got None"),
    (lambda: FlashCrossAttention(deterministic="x"), "deterministic: got 'x'"),
    (lambda: FlashSelfAttention()(QKV, causal=2), "causal: got 2"),
    (lambda: packed_layout([0, 8], 2, causal=1), "causal: got 1"),
    (lambda: SelfAttention()(QKV, causal=2), "causal: got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), FLAGS, ids=[says for _, says in FLAGS])
def test_a_flag_is_a_bool(call, says):
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == f"{says}; True or False is needed"


NUMBERS = [
    (lambda: raw_forward(softmax_scale=True), "softmax_scale: got True; a number"),
    (lambda: raw_forward(window_size_left=True), "window_size: got (True, -1)"),
    (lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=True), "seqlen_offsets: got True"),
    (lambda: apply_rotary_emb(X, COS, SIN, seqlen_offsets=1.0), "seqlen_offsets: got 1.0; an int"),
    (
        lambda: apply_rotary_emb_qkv_(QKV.flatten(2, 3).clone(), COS, SIN, num_heads_q=True),
        "num_heads_q: got True; an integer",
    ),
    (lambda: packed_layout([0, 8], 2, window=True), "window: got True; an integer"),
    (lambda: packed_layout([0, 8], 2, token_work=True), "token_work: got True; a number"),
    (lambda: FlashSelfAttention(softmax_scale=True), "softmax_scale: got True; a number"),
    (lambda: CrossAttention(softmax_scale=float("nan")), "softmax_scale: got nan; a finite"),
    (lambda: CrossAttention(attention_dropout=True), "attention_dropout: got True; a number"),
    (lambda: FlashSelfAttention()(QKV, cu_seqlens=COS, max_seqlen=True), "qkv: got shape"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), NUMBERS, ids=[says for _, says in NUMBERS])
def test_a_bool_is_no_number(call, says):
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert str(raised.value).startswith(says)


def test_bools_of_numpy_are_flags():
    expected = flash_attn_func(X, X, X, causal=True, return_lse=True)
    found = flash_attn_func(X, X, X, causal=TRUE, deterministic=NO, return_lse=TRUE)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(flash_attn_func(X, X, X, return_lse=NO), flash_attn_func(X, X, X))
    probs = flash_attn_func(X, X, X, return_attn_probs=TRUE, batch_invariant=TRUE)[2]
    assert probs.shape == (2, 4, 6, 6)
    cached = flash_attn_with_kvcache(X, X, X, causal=TRUE, rotary_interleaved=NO)
    torch.testing.assert_close(cached, expected[0])
    out, lse, *_ = raw_forward(causal=TRUE, return_softmax=TRUE)
    gradients = [torch.empty_like(X) for _ in range(3)]
    _flash_attn_backward(
        X, X, X, X, out, lse, *gradients, 0.0, 0.2, TRUE, -1, -1, 0.0, None, deterministic=TRUE
    )
    turned = apply_rotary_emb(X, COS, SIN, interleaved=TRUE, inplace=NO)
    assert torch.equal(turned, apply_rotary_emb(X, COS, SIN, interleaved=True))


def test_flags_that_a_compiler_traces():
    def causal_unless_one(x):
        return flash_attn_func(x, x, x, causal=x.shape[1] > 1)

    compiled = torch.compile(causal_unless_one, backend="aot_eager", dynamic=True, fullgraph=True)
    for seqlen in (1, 3, 7):
        x = torch.randn(2, seqlen, 4, 32)
        torch.testing.assert_close(compiled(x), causal_unless_one(x))


@pytest.mark.parametrize("name", ["out_a", "lse_a", "out_b", "lse_b", "out"])
def test_merge_takes_tensors(name):
    lse = torch.zeros(2, 4, 6)
    call = {"out_a": X, "lse_a": lse, "out_b": X, "lse_b": lse, "out": X.clone()}
    with pytest.raises(TypeError, match=f"{name}: got list; a torch.Tensor is needed"):
        merge_attention(**call | {name: [1.0]})


def test_merge_takes_the_dtypes_of_attention():
    lse = torch.zeros(2, 4, 6)
    with pytest.raises(ValueError, match=r"lse_b: got dtype torch.float64; torch.float32"):
        merge_attention(X, lse, X, lse.double())
    with pytest.raises(ValueError, match=r"out_a: got dtype torch.float16; that of out_b, torch.b"):
        merge_attention(X.half(), lse, X.bfloat16(), lse)
    with pytest.raises(ValueError, match=r"out_a: got shape \(6, 4, 32\); \(batch, rows,"):
        merge_attention(X[0], lse[0], X[0], lse[0])


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
def test_a_habit_from_torch(function):
    """scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal): of these four
    positions one more is taken here, and softmax_scale is where is_causal may be meant."""
    ends = torch.tensor([0, 6], dtype=torch.int32)
    call = (X[0], X[0], X[0], ends, ends, 6, 6) if function is not flash_attn_func else (X, X, X)
    with pytest.raises(TypeError, match=r"softmax_scale: got True.*pass them by keyword"):
        function(*call, 0.0, True)
    with pytest.raises(TypeError, match="dropout_p: got None"):
        function(*call, None, 0.0, True)
    with pytest.raises(TypeError, match=r"softmax_scale: got True.*pass them by keyword"):
        flash_attn_qkvpacked_func(QKV, 0.0, True)
