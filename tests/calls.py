"""The calls under test and their two references, for a `Case`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

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
    exponent = partial(exponent_error, out.dtype, ref_lse, ref_out)
    assert_accurate("out", out, ref_out, std_out, unavoidable=exponent)
    assert_lse("lse", lse, ref_lse, partial(lse_in_float32, standard, differentiable(x)))


def lse_in_float32(standard, inputs: dict[str, Tensor]) -> Tensor:
    """lse of standard attention in float32 (float64 for float64 inputs)."""
    wider = {n: x.to(torch.promote_types(x.dtype, torch.float32)) for n, x in inputs.items()}
    return standard(**wider)[1]


def differentiable(x: Inputs) -> dict[str, Tensor]:
    named = {"q": x.q, "k": x.k, "v": x.v}
    return named if x.s_aux is None else {**named, "s_aux": x.s_aux}


def check_gradients(
    ours, reference, standard, inputs: dict[str, Tensor], dout, dlse=None, dropout_p: float = 0.0
) -> None:
    """out, lse and every gradient of three functions of the same inputs against the bar."""
    ExpectedGradients(reference, standard, inputs, dout, dlse, dropout_p).check(ours)


@dataclass
class ExpectedGradients:
    """What `check` compares with: out, lse and every gradient, computed once for many kernels."""

    reference: Callable  # of the inputs, to (out, lse)
    standard: Callable
    inputs: dict[str, Tensor]
    dout: Tensor
    dlse: Tensor | None = None
    dropout_p: float = 0.0

    @cached_property
    def of_reference(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return gradients(self.reference, self.inputs, self.dout, self.dlse, torch.float64)

    @cached_property
    def of_standard(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return gradients(self.standard, self.inputs, self.dout, self.dlse)

    @cached_property
    def of_rounded_out(self) -> dict[str, Tensor]:
        """The reference's gradients, given what a flash kernel's backward is given.

        That is `out` in its dtype, and rowsum(dout * out) with it: the error of that rounding, and
        of a sum in another order than dout @ v^T, is the same for every key of a row, where
        standard attention's averages out.  It acts like a gradient of lse, so the reference tells
        its size.
        """
        out, dout = self.of_reference[0], self.dout.double()
        rounded = (dout * (out.to(self.of_standard[0].dtype).double() - out)).sum(-1)
        accumulation = torch.finfo(self.of_standard[1].dtype).eps * (dout * out).abs().sum(-1)
        rounded = rounded + rounded.sign() * accumulation + (rounded == 0) * accumulation
        rounded = -rounded.transpose(-1, -2)  # (b, sq, h) -> (b, h, sq), or (total, h) packed
        like_lse = rounded if self.dlse is None else rounded + self.dlse
        return gradients(self.reference, self.inputs, self.dout, like_lse, torch.float64)[2]

    def check(self, ours: Callable) -> None:
        out, lse, grads = gradients(ours, self.inputs, self.dout, self.dlse)
        ref_out, ref_lse, ref_grads = self.of_reference
        std_out, _, std_grads = self.of_standard
        exponent = partial(exponent_error, out.dtype, ref_lse)
        assert_accurate("out", out, ref_out, std_out, unavoidable=partial(exponent, ref_out))
        assert_lse("lse", lse, ref_lse, partial(lse_in_float32, self.standard, self.inputs))
        for name, grad in grads.items():
            ref = ref_grads[name]
            factor = 3.0 if self.dropout_p > 0 and name in ("k", "v") else 2.0

            def unavoidable(name=name, ref=ref) -> float:
                return max(max_error(self.of_rounded_out[name], ref)[0], exponent(ref))

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
