"""Describe a call on torch's CPU tensors to the kernels, as csrc/api does for CUDA tensors."""

from __future__ import annotations

from types import ModuleType

import torch
from cases import poisoned
from torch import Tensor

NAN = float("nan")


class Outputs:
    """Tensors inside larger ones, all of it NaN until a kernel writes there."""

    def __init__(self, **like: tuple[tuple[int, ...], torch.dtype]):
        for name, (shape, dtype) in like.items():
            setattr(self, name, poisoned(torch.full(shape, NAN, dtype=dtype)))

    def results(self) -> tuple[Tensor, ...]:
        """Copies, once it is sure that nothing was written around them."""
        copies = tuple(x.clone() for x in vars(self).values())
        for x in vars(self).values():
            assert torch.equal(x.fill_(NAN)._base.isnan(), torch.ones_like(x._base, dtype=bool))
        return copies


def rows(x: Tensor) -> tuple[int, int, int]:
    """Address and strides of (b, h, s), or of packed (h, total)."""
    return x.data_ptr(), x.stride(0) if x.dim() == 3 else 0, x.stride(-2)


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
    call = _common(q, k, v, out, lse, causal, window_size, softmax_scale)
    return scores(call | dense_lengths(q, k), **full)


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
    out_shape, lse_shape = (b, seqlen_q, heads, v.shape[-1]), (b, heads, seqlen_q)
    output = Outputs(out=(out_shape, q.dtype), lse=(lse_shape, torch.float32))
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
    out_shape, lse_shape = (total_q, heads, v.shape[-1]), (heads, total_q)
    output = Outputs(out=(out_shape, q.dtype), lse=(lse_shape, torch.float32))
    call = _common(q, k, v, output.out, output.lse, causal, window_size, None)
    call |= varlen_lengths(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k)
    if leftpad_k is not None:
        call["leftpad_k"] = leftpad_k.data_ptr()
    return _run(kernels, variant, scores(call, **full), output, s_dmask)


def _run(kernels, variant: str, call: dict, output: Outputs, s_dmask: Tensor | None):
    kernels.run(variant, call)
    if s_dmask is not None:
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[s_dmask.dtype]
        kernels.probabilities(name, call | {"s_dmask": s_dmask.data_ptr()})
    return output.results()


def backward(
    kernels: ModuleType,
    variant: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: dict,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    dlse: Tensor | None = None,
    wanted: tuple[str, ...] = ("dq", "dk", "dv"),
    deterministic: bool = False,
    last_block_first: bool = False,
    **full,
) -> tuple[Tensor, ...]:
    """softmax_d, the gradients that are wanted, and with s_aux its gradient.

    lengths: of `dense_lengths` or `varlen_lengths`. NaN wherever no kernel wrote.
    """
    inputs = {"dq": q, "dk": k, "dv": v}
    like = {name: (inputs[name].shape, q.dtype) for name in wanted}
    if full.get("s_aux") is not None:
        like["ds_aux"] = (full["s_aux"].shape, torch.float32)
    output = Outputs(softmax_d=(lse.shape, torch.float32), **like)
    call = _common(q, k, v, out, lse, causal, window_size, softmax_scale) | lengths
    call |= {name: view(getattr(output, name)) for name in wanted}
    call |= {"dout": view(dout), "softmax_d": rows(output.softmax_d)}
    call |= {"deterministic": deterministic, "last_block_first": last_block_first}
    if dlse is not None:
        call["dlse"] = rows(dlse)
    if "ds_aux" in like:
        call["ds_aux"] = output.ds_aux.data_ptr()
    kernels.run(variant, scores(call, **full))
    return output.results()


def dense_lengths(q: Tensor, k: Tensor) -> dict:
    return {"batch": q.shape[0], "seqlen_q": q.shape[1], "seqlen_k": k.shape[1]}


def varlen_lengths(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k: Tensor | None = None) -> dict:
    """The tensors have to live as long as the result is used."""
    lengths = {
        "batch": len(cu_seqlens_q) - 1,
        "seqlen_q": int(cu_seqlens_q.diff().max()),
        "seqlen_k": int(cu_seqlens_k.diff().max()),
        "total_q": q.shape[0],
        "total_k": k.shape[0],
        "cu_q": cu_seqlens_q.data_ptr(),
        "cu_k": cu_seqlens_k.data_ptr(),
    }
    return lengths if seqused_k is None else lengths | {"used_k": seqused_k.data_ptr()}


def _common(q, k, v, out, lse, causal, window_size, softmax_scale) -> dict:
    left, right = window_size
    return {
        "q": view(q),
        "k": view(k),
        "v": view(v),
        "out": view(out),
        "lse": rows(lse),
        "left": left,
        "right": 0 if causal else right,
        "softmax_scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        "heads_q": q.shape[-2],
        "heads_kv": k.shape[-2],
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
    }
