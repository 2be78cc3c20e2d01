"""``flash_attn.explain(...)``: what a call would run on, and why nothing else; runs nothing. It
describes the call, and ``cpu`` or ``gpu`` answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn import _gpus as gpus
from flash_attn import backend
from flash_attn.api import checks, checks_fp8, checks_latent
from flash_attn.call import FP8, Contents, Descale, Keys, Lengths, MaxLogits, Options, Window

from . import codes
from .cpu import on_cpu
from .explanation import Explanation
from .gpu import on_gpu
from .problem import Problem


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_max_logits: MaxLogits = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    block_table: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    num_splits: int = 0,
    kvcache: bool = False,
    new_keys: int = 0,
    rotary: bool = False,
    backward: bool = False,
    gpu: str | None = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    q_descale: Descale = None,
    out_dtype: torch.dtype | None = None,
    fp8_products: bool = False,
    qv: Tensor | None = None,
    sm_margin: int = 0,
) -> Explanation:
    """Says which backend, kernel, tile and splits a call would use, and why.

    Nothing is computed; fake and meta tensors do as well as real ones, and neither a GPU nor the
    compiled library is needed (but for ``gpu``, the library). ``print`` the result.

    Arguments:
        q, k, v: as in ``flash_attn_func``. With cu_seqlens_q, those of
            ``flash_attn_varlen_func``; with kvcache=True or cache_seqlens, the q, k_cache and
            v_cache of ``flash_attn_with_kvcache``.
        kvcache: the call is ``flash_attn_with_kvcache``; new_keys is how many it appends to each
            sequence, and rotary whether it rotates them. :func:`explain_call` takes the tensors.
        backward: explain the backward of the call in place of its forward.
        gpu: the GPU to ask about, whatever q's device: "H200", "H100", "A100", "L40S", "RTX 4090",
            "RTX 5090" or "GB10". None: that of q, or the CPU.
        sm_margin: how many of its SMs the call leaves to others.

    The others are those of the call.

    Raises:
        TypeError, ValueError: what the call itself would raise for q, k and v; another ``gpu``.
        NotImplementedError: what attention of codes (a q of float8_e4m3fn) has not.
    """
    gpus.check(gpu)
    if qv is not None:
        if not (kvcache or cache_seqlens is not None):
            checks_latent.in_pages(block_table)
        checks_latent.refuse(dropout_p, return_attn_probs, return_max_logits)
    given = checks_fp8.given_of(q_descale, k_descale, v_descale, out_dtype, fp8_products)
    in_use = {
        "dropout": dropout_p > 0,
        "softcap": softcap != 0,
        "alibi": alibi_slopes is not None,
        "sinks": s_aux is not None,
        "attn_probs": return_attn_probs,
        "max_logits": return_max_logits is not False,
        "paged": block_table is not None,
        "scale <= 0": softmax_scale is not None and softmax_scale <= 0,
    }
    cached = bool(kvcache) or cache_seqlens is not None
    new_keys = checks.integer(new_keys, "new_keys")
    operation = _check(q, k, v, qv, cu_seqlens_q, block_table, cached)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    longest_q = _length(q, cu_seqlens_q, max_seqlen_q)
    runs_on_gpu = gpu is not None or q.device.type == "cuda"
    way = None
    asked = Options(dropout_p, return_attn_probs=return_attn_probs,
                    return_max_logits=return_max_logits)  # fmt: skip
    lengths = None
    if cu_seqlens_q is not None:
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, longest_q, 0)
    if checks_fp8.are_codes(q):
        way = codes.way_of(q, k, v, asked, given, lengths, block_table, batch_invariant, gpu)
        contents, notes = way.contents, way.notes if runs_on_gpu else ()
    else:
        in_pages = lengths is not None and block_table is not None
        descales = checks_fp8.of_cache(given, k, v, q, batch, in_pages)
        contents, notes = _contents(k, k_descale, v_descale, qv)
        if given.fp8_products and runs_on_gpu:
            keys = Keys(block_table, cache_leftpad)
            way = codes.way_beside_pages(
                q, k, v, asked, descales, lengths, keys, batch_invariant, gpu, contents
            )
            contents, notes = way.contents, notes + way.notes
    if way is not None and (contents is Contents.PRODUCTS or not runs_on_gpu):
        operation = "_flash_attn_fp8_forward"
    problem = Problem(
        operation=operation.replace("forward", "backward") if backward else operation,
        q=q, k=k, v=v, causal=causal, window_size=checks.window(window_size),
        extras=tuple(name for name, used in in_use.items() if used),
        packed=cu_seqlens_q is not None,
        batch=batch,
        longest_q=longest_q,
        capacity=_capacity(k, cu_seqlens_q, max_seqlen_k, block_table),
        cached=cached,
        num_splits=checks.num_splits(num_splits),
        batch_invariant=bool(batch_invariant),
        softcap=softcap,
        deterministic=bool(deterministic),
        left_padded=cache_leftpad is not None,
        used_k=cache_seqlens is not None or cache_leftpad is not None or block_table is not None,
        contents=contents,
        way=way,
        sm_margin=checks.sm_margin(sm_margin),
        notes=notes + (f"append {new_keys}",) * bool(new_keys) + ("rotary",) * rotary,
        gpu=gpu,
    )  # fmt: skip
    if backward and (cached or block_table is not None or way is not None):
        return problem.unserved("there is no backward of a cache, pages or codes")
    return on_gpu(problem) if runs_on_gpu else on_cpu(problem)


def _contents(
    k: Tensor, k_descale: Descale, v_descale: Descale, qv: Tensor | None
) -> tuple[Contents, tuple[str, ...]]:
    """What keys hold beside queries that are no codes, and notes."""
    if qv is not None:
        return Contents.LATENT, ("latent cache",)
    if k.dtype is not FP8:
        return Contents.NUMBERS, ()
    notes = ("cache of float8_e4m3fn",)
    if any(isinstance(x, Tensor) and x.ndim == 3 for x in (k_descale, v_descale)):
        return Contents.CODES_OF_ROWS, (*notes, "descales of rows")
    return Contents.CODES, notes


def _length(x: Tensor, cu_seqlens: Tensor | None, longest: int | Tensor | None) -> int:
    """What a call takes for the longest sequence of (batch, seqlen, …), or of a packed x."""
    if cu_seqlens is None:
        return x.shape[1]
    known = longest is not None and not isinstance(longest, Tensor)
    return checks.integer(longest, "max_seqlen") if known else x.shape[0]


def _capacity(k: Tensor, cu_seqlens_q, max_seqlen_k, block_table: Tensor | None) -> int:
    if block_table is not None:
        return k.shape[1] * block_table.shape[1]
    return _length(k, cu_seqlens_q, max_seqlen_k)


def _check(q, k, v, qv, cu_seqlens_q, block_table, kvcache: bool) -> str:
    """The name of the operation; q, k and v have been checked as it would."""
    of_codes = checks_fp8.are_codes(q) and not kvcache and qv is None
    if cu_seqlens_q is None and not kvcache and qv is None:
        checks.dense(q, k, v, checks_fp8.operands if of_codes else checks.operands)
        return "_flash_attn_forward"
    q_layout, kv_layout = (
        (checks.DENSE_Q, checks.CACHE) if kvcache else (checks.VARLEN_Q, checks.VARLEN_KV)
    )
    take = checks.operands if qv is None else checks_latent.operands
    take = checks_fp8.operands if of_codes else take
    take(q, k, v, q_layout, kv_layout if block_table is None else checks.PAGES)
    if qv is not None:
        checks_latent.queries(qv, q, v, "v_cache" if kvcache else "v")
    return "_flash_attn_with_kvcache" if kvcache else "_flash_attn_varlen_forward"


def trace(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """One line for FLASH_ATTN_LOG=1, once per distinct call."""
    choice = explain(q, k, v, **options)
    line = f"{choice.operation}: {choice.call} -> {choice.backend}: {choice.kernel}"
    backend.trace(line + "".join(f"; slow: {reason}" for reason in choice.slow))
