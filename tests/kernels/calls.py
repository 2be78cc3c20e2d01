"""Describe a call on torch's CPU tensors to the kernels, as csrc/api does for CUDA tensors."""

from __future__ import annotations

from types import ModuleType

import torch
from cases import poisoned
from torch import Tensor

NAN = float("nan")


class Output:
    """out and lse inside larger tensors, all of it NaN until a kernel writes there."""

    def __init__(self, shape: tuple[int, ...], lse_shape: tuple[int, ...], dtype: torch.dtype):
        self.out = poisoned(torch.full(shape, NAN, dtype=dtype))
        self.lse = poisoned(torch.full(lse_shape, NAN))

    def results(self) -> tuple[Tensor, Tensor]:
        """Copies, once it is sure that nothing was written around them."""
        copies = self.out.clone(), self.lse.clone()
        for x in (self.out, self.lse):
            assert torch.equal(x.fill_(NAN)._base.isnan(), torch.ones_like(x._base, dtype=bool))
        return copies


def view(x: Tensor) -> tuple[int, int, int, int]:
    """Address and strides of (b, s, h, d), or of packed (total, h, d)."""
    batch_stride = x.stride(0) if x.dim() == 4 else 0
    return x.data_ptr(), batch_stride, x.stride(-3), x.stride(-2)


def scores(
    call: dict,
    *,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
) -> dict:
    """Adds what the full score level reads."""
    call |= {"softcap": softcap}
    if alibi_slopes is not None:
        call["alibi_slopes"] = alibi_slopes.data_ptr()
        call["alibi_batch_stride"] = alibi_slopes.stride(0) if alibi_slopes.dim() == 2 else 0
    if s_aux is not None:
        call["s_aux"] = s_aux.data_ptr()
    if dropout_p > 0:
        call |= {
            "dropout_p": dropout_p,
            "dropout_threshold": round(dropout_p * 65536),
            "rng_state": rng_state.data_ptr(),
        }
    return call


def dense_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    **full,
) -> dict:
    """What module.cpp reads for out (b, sq, h, dv) and lse (b, h, sq), of any strides."""
    call = _common(q, k, v, out, causal, window_size, softmax_scale)
    call |= {
        "lse": (lse.data_ptr(), *lse.stride()[:2]),
        "batch": q.shape[0],
        "seqlen_q": q.shape[1],
        "seqlen_k": k.shape[1],
    }
    return scores(call, **full)


def dense(
    kernels: ModuleType,
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    s_dmask: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """out (b, sq, h, dv) and lse (b, h, sq) of one call; NaN wherever the kernel wrote nothing.

    s_dmask (b, h, sq, sk): filled by the kernel for probabilities.
    """
    b, seqlen_q, heads, _ = q.shape
    output = Output((b, seqlen_q, heads, v.shape[-1]), (b, heads, seqlen_q), q.dtype)
    call = dense_call(q, k, v, output.out, output.lse, **options)
    return _run(kernels, variant, call, output, s_dmask)


def varlen(
    kernels: ModuleType,
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    s_dmask: Tensor | None = None,
    **full,
) -> tuple[Tensor, Tensor]:
    """out (total_q, h, dv) and lse (h, total_q); NaN wherever the kernel wrote nothing.

    s_dmask (b, h, longest sq, longest sk): filled by the kernel for probabilities.
    """
    total_q, heads, _ = q.shape
    output = Output((total_q, heads, v.shape[-1]), (heads, total_q), q.dtype)
    call = _common(q, k, v, output.out, causal, window_size, None)
    call |= {
        "lse": (output.lse.data_ptr(), 0, output.lse.stride(0)),
        "batch": len(cu_seqlens_q) - 1,
        "seqlen_q": int(cu_seqlens_q.diff().max()),
        "seqlen_k": int(cu_seqlens_k.diff().max()),
        "total_q": total_q,
        "total_k": k.shape[0],
        "cu_q": cu_seqlens_q.data_ptr(),
        "cu_k": cu_seqlens_k.data_ptr(),
    }
    if seqused_k is not None:
        call["used_k"] = seqused_k.data_ptr()
    if leftpad_k is not None:
        call["leftpad_k"] = leftpad_k.data_ptr()
    return _run(kernels, variant, scores(call, **full), output, s_dmask)


def _run(kernels, variant: str, call: dict, output: Output, s_dmask: Tensor | None):
    kernels.run(variant, call)
    if s_dmask is not None:
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[s_dmask.dtype]
        kernels.probabilities(name, call | {"s_dmask": s_dmask.data_ptr()})
    return output.results()


def _common(q, k, v, out, causal, window_size, softmax_scale) -> dict:
    left, right = window_size
    return {
        "q": view(q),
        "k": view(k),
        "v": view(v),
        "out": view(out),
        "left": left,
        "right": 0 if causal else right,
        "softmax_scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        "heads_q": q.shape[-2],
        "heads_kv": k.shape[-2],
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
    }
