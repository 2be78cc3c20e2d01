"""Attention in 8 bits from tensors in 16, ``flash_attn.fp8.attention``; the formula: docs/fp8.md.

Codes that a program has already are taken by ``flash_attn_func`` and ``flash_attn_varlen_func``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.api import checks, checks_fp8
from flash_attn.call import Keys, Options, Window
from flash_attn.dispatch.encode import make_codes
from flash_attn.flash_attn_interface import flash_attn_func

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    smooth_k: bool = True,
    batch_invariant: bool = False,
    return_lse: bool = False,
    fp8_products: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn_func`` with q, k and v rounded to codes in float8_e4m3fn. No gradient.

    Each has a descale for each sequence and KV head, by which its largest number becomes the
    largest code. The mean of the keys of a sequence and head is taken off before: it adds the same
    to all scores of a query, which a softmax does not see.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16 or, on the CPU, float32.
        k, v: (batch, seqlen_k, heads_k, head_dim), dtype and device of q; heads_k divides heads.
        smooth_k: take the mean off the keys. Not with softcap and s_aux, which see it.
        fp8_products: permits Hopper GPUs to multiply codes as they are: faster, and about 2% of
            the norm of out less accurate. As in ``flash_attn_func``, as are the others.

    Returns:
        out (batch, seqlen_q, heads, head_dim), dtype of q; of float32, bfloat16. With return_lse
        ``(out, lse)``: lse (batch, heads, seqlen_q), float32, of the keys as they were given.

    Raises:
        TypeError, ValueError: an argument that is not as above; the message names it.
        RuntimeError: a tensor that requires a gradient, while gradients are enabled.
    """
    checks.dense(q, k, v)
    checks_fp8.options(Options(), Keys(), (q, k, v, s_aux))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    smooth_k = checks.flag(smooth_k, "smooth_k") and softcap == 0 and s_aux is None
    codes = make_codes(q, k, v, smooth_k)
    out, lse = flash_attn_func(
        codes.q, codes.k, codes.v, softmax_scale=scale, causal=causal, window_size=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, s_aux=s_aux, batch_invariant=batch_invariant,
        return_lse=True, q_descale=codes.q_descale, k_descale=codes.k_descale,
        v_descale=codes.v_descale,
        out_dtype=torch.float16 if q.dtype is torch.float16 else torch.bfloat16,
        fp8_products=fp8_products,
    )  # fmt: skip
    if not checks.flag(return_lse, "return_lse"):
        return out
    if codes.k_mean.shape[1]:
        group = q.shape[2] // k.shape[2]
        of_mean = (q.float() * codes.k_mean.repeat_interleave(group, 2)).sum(-1)  # (b, sq, h)
        lse = lse + of_mean.transpose(1, 2) * scale
    return out, lse
