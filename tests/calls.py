"""The calls under test and their two references, for a `Case`."""

from __future__ import annotations

from functools import partial

import torch
from cases import SEED, Case, Inputs, padded_on_gpu, rng_state
from compare import assert_accurate, assert_lse, exponent_error, max_error
from reference import attention_ref, gradients, standard_attention
from torch import Tensor

import flash_attn
from flash_attn.call import Scoring


def dense(case: Case, x: Inputs, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None = None):
    """out, lse of the case. With dropout through the op, which takes the generator's state."""
    if case.dropout_p == 0:
        return flash_attn.flash_attn_func(
            q, k, v, softmax_scale=case.scale, softcap=case.softcap, alibi_slopes=x.alibi_slopes,
            s_aux=s_aux, return_lse=True, **case.mask_kwargs(),
        )  # fmt: skip
    out, lse, _, _ = torch.ops.flash_attn._flash_attn_forward(
        *padded_on_gpu(q, k, v),
        *case.scoring(x.alibi_slopes),
        False,
        s_aux=s_aux,
        rng_state=rng_state(q.device, SEED),
    )
    return out[..., : case.value_dim], lse


def written_out(case: Case, x: Inputs, attention):
    """The same function of (q, k, v, s_aux) through `attention_ref` or `standard_attention`."""

    def call(q, k, v, s_aux=None):
        out, lse, _ = attention(q, k, v, s_aux=s_aux, **case.reference_kwargs(x))
        return out, lse

    return call


def check_forward(case: Case, x: Inputs) -> None:
    out, lse = dense(case, x, x.q, x.k, x.v, x.s_aux)
    ref_out, ref_lse = written_out(case, x, attention_ref)(x.q, x.k, x.v, x.s_aux)
    standard = written_out(case, x, standard_attention)
    std_out, _ = standard(x.q, x.k, x.v, x.s_aux)
    exponent = exponent_error(out.dtype, ref_lse, ref_out)
    assert_accurate("out", out, ref_out, std_out, unavoidable=exponent)
    assert_lse("lse", lse, ref_lse, in_float32(standard, differentiable(x))[1])


def in_float32(standard, inputs: dict[str, Tensor]):
    """out, lse of standard attention in float32 (float64 for float64 inputs)."""
    wider = {n: x.to(torch.promote_types(x.dtype, torch.float32)) for n, x in inputs.items()}
    return standard(**wider)


def differentiable(x: Inputs) -> dict[str, Tensor]:
    named = {"q": x.q, "k": x.k, "v": x.v}
    return named if x.s_aux is None else {**named, "s_aux": x.s_aux}


def check_gradients(
    ours, reference, standard, inputs: dict[str, Tensor], dout, dlse=None, dropout_p: float = 0.0
) -> None:
    """out, lse and every gradient of three functions of the same inputs against the bar.

    The backward pass is given `out` in its dtype, and rowsum(dout * out) with it: the error of that
    rounding, and of a sum in another order than dout @ v^T, is the same for every key of a row,
    where standard attention's averages out.  It acts like a gradient of lse, so the reference tells
    its size.
    """
    out, lse, grads = gradients(ours, inputs, dout, dlse)
    ref_out, ref_lse, ref_grads = gradients(reference, inputs, dout, dlse, torch.float64)
    std_out, _, std_grads = gradients(standard, inputs, dout, dlse)
    rounded = (dout.double() * (ref_out.to(out.dtype).double() - ref_out)).sum(-1)
    accumulation = torch.finfo(lse.dtype).eps * (dout.double() * ref_out).abs().sum(-1)
    rounded = rounded + rounded.sign() * accumulation + (rounded == 0) * accumulation
    rounded = -rounded.transpose(-1, -2)  # (b, sq, h) -> (b, h, sq), or (total, h) -> (h, total)
    if dlse is not None:
        rounded = rounded + dlse
    _, _, given_out = gradients(reference, inputs, dout, rounded, torch.float64)

    exponent = exponent_error(out.dtype, ref_lse, ref_out)
    assert_accurate("out", out, ref_out, std_out, unavoidable=exponent)
    assert_lse("lse", lse, ref_lse, in_float32(standard, inputs)[1])
    for name, grad in grads.items():
        ref = ref_grads[name]
        factor = 3.0 if dropout_p > 0 and name in ("k", "v") else 2.0
        exponent = exponent_error(out.dtype, ref_lse, ref)
        unavoidable = max(max_error(given_out[name], ref)[0], exponent)
        assert_accurate(f"d{name}", grad, ref, std_grads[name], factor, unavoidable)


def check_backward(case: Case, x: Inputs, with_dlse: bool = False) -> None:
    check_gradients(
        partial(dense, case, x),
        written_out(case, x, attention_ref),
        written_out(case, x, standard_attention),
        differentiable(x),
        x.dout,
        x.dlse if with_dlse else None,
        case.dropout_p,
    )


def scored(softmax_scale: float, **options) -> Scoring:
    """What an operation does to scores, without what is not named."""
    plain = Scoring(
        dropout_p=0.0, softmax_scale=softmax_scale, causal=False, window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, s_aux=None,
    )  # fmt: skip
    return plain._replace(**options)
