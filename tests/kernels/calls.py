"""Describe a call on torch's CPU tensors to the kernels, as csrc/api does for CUDA tensors."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from cases import poisoned
from reference_dropout import rate
from torch import Tensor

NAN = float("nan")


class Outputs:
    """Tensors full of `before`, until a kernel writes there, inside larger ones full of NaN."""

    def __init__(self, before: float = NAN, **like: tuple[tuple[int, ...], torch.dtype]):
        for name, (shape, dtype) in like.items():
            setattr(self, name, poisoned(torch.full(shape, before, dtype=dtype)))

    def results(self) -> tuple[Tensor, ...]:
        """Copies, once it is sure that nothing was written around them."""
        copies = tuple(x.clone() for x in vars(self).values())
        for x in vars(self).values():
            assert torch.equal(x.fill_(NAN)._base.isnan(), torch.ones_like(x._base, dtype=bool))
        return copies


TILES = ("first", "second", "packed", "split")  # params/forward_tile.h


@dataclass
class OnTile:
    """The kernels, where a forward takes this tile of its row, whatever is planned."""

    kernels: ModuleType
    tile: str

    def run(self, variant: str, call: dict) -> None:
        self.kernels.run(variant, call | {"tile": TILES.index(self.tile)})


ALL_QUERIES = -1
DECODED_ROWS = 64  # of a sequence, all heads of a KV head, that the decode kernel takes


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
    """Adds what kernels with score mods read, and sinks."""
    call |= {"softcap": softcap}
    if alibi_slopes is not None:
        call["alibi_slopes"] = alibi_slopes.data_ptr()
        call["alibi_batch_stride"] = alibi_slopes.stride(0) if alibi_slopes.dim() == 2 else 0
        call["alibi_head_stride"] = alibi_slopes.stride(-1)
    if s_aux is not None:
        call["s_aux"] = s_aux.data_ptr()
    if dropout_p > 0:
        call |= {
            "dropout_p": rate(dropout_p),
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
    max_logits: str = "",
    codes: dict | None = None,
    out_dtype: torch.dtype | None = None,
    **options,
) -> tuple[Tensor, ...]:
    """out (b, sq, h, dv) and lse (b, h, sq) of one call; NaN wherever the kernel wrote nothing.

    codes: `code_descales` of q, k and v; out_dtype: of a call with them. s_dmask (b, h, sq, sk):
    filled by the kernel for probabilities. max_logits: "rows" or "heads", whose largest are the
    third result, like lse or (h,).
    """
    b, seqlen_q, heads, _ = q.shape
    out_shape, lse_shape = (b, seqlen_q, heads, v.shape[-1]), (b, heads, seqlen_q)
    output = Outputs(out=(out_shape, out_dtype or q.dtype), lse=(lse_shape, torch.float32))
    call = dense_call(q, k, v, output.out, output.lse, **options)
    call |= (codes or {}) | {"bf16_out": out_dtype is torch.bfloat16}
    if max_logits:
        ask_for_max_logits(call, output, max_logits)
    return _run(kernels, variant, call, output, s_dmask)


def ask_for_max_logits(call: dict, output: Outputs, of: str) -> None:
    """Strides of rows' are those of lse."""
    like = output.lse if of == "rows" else output.lse.new_empty(output.lse.shape[-2])
    output.max_logits = poisoned(torch.full_like(like, NAN))
    call["max_logits"] = output.max_logits.data_ptr()
    if of == "heads":
        call["logits_of_heads"] = True


def varlen(
    kernels: ModuleType,
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    before: float = NAN,
    s_dmask: Tensor | None = None,
    max_logits: str = "",
    few: str | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    last_block_first: bool = False,
    stream: int = 0,
    hopper_sms: int = 0,
    cluster: int = 1,
    **full,
) -> tuple[Tensor, ...]:
    """out (total_q, h, dv) and lse (h, total_q); `before` wherever the kernel wrote nothing.

    max_seqlen_q, max_seqlen_k: what the call says, if not the truth. s_dmask (b, h, longest sq,
    longest sk): filled by the kernel for probabilities. max_logits: as of `dense`. few: a decode
    kernel for the sequences of up to 64 rows, and its num_splits; `variant` has the others, if any
    may be left. stream, hopper_sms, cluster: as of `cached`.
    """
    total_q, heads, _ = q.shape
    out_shape, lse_shape = (total_q, heads, v.shape[-1]), (heads, total_q)
    output = Outputs(before, out=(out_shape, q.dtype), lse=(lse_shape, torch.float32))
    call = _common(q, k, v, output.out, output.lse, causal, window_size, None)
    lengths = (seqused_k, max_seqlen_q, max_seqlen_k)
    call |= varlen_lengths(q, k, cu_seqlens_q, cu_seqlens_k, *lengths)
    if leftpad_k is not None:
        call["leftpad_k"] = leftpad_k.data_ptr()
    if block_table is not None:
        call |= pages(k, block_table)
    call |= {"batch_invariant": batch_invariant, "last_block_first": last_block_first}
    scores(call, **full)
    if max_logits:
        ask_for_max_logits(call, output, max_logits)
    if few is None:
        return _run(kernels, variant, call, output, s_dmask)
    group, longest = heads // k.shape[-2], min(call["seqlen_q"], total_q)
    call["few_q"] = ALL_QUERIES if longest * group <= DECODED_ROWS else DECODED_ROWS // group
    assert call["few_q"] != 0
    if call["few_q"] > 0:
        kernels.run(variant, call)
    call |= {"num_splits": num_splits, "stream": stream, "hopper_sms": hopper_sms}
    call["cluster"] = cluster
    kernels.run_decode(few, call)
    return output.results()


def _run(kernels, variant: str, call: dict, output: Outputs, s_dmask: Tensor | None):
    kernels.run(variant, call)
    if s_dmask is not None:
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[s_dmask.dtype]
        kernels.probabilities(name, call | {"s_dmask": s_dmask.data_ptr()})
    return output.results()


def cached(
    kernels: ModuleType,
    variant: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    new: int = 0,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = 0,
    before: float = NAN,
    last_block_first: bool = False,
    stream: int = 0,
    hopper_sms: int = 0,
    cluster: int = 1,
    largest_cluster: int = 16,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    brings: dict | None = None,
    codes: dict | None = None,
    **full,
) -> tuple[Tensor, Tensor]:
    """out (b, sq, h, dv) and lse (b, h, sq) against a cache to which `new` keys were appended.

    num_splits None: by the forward kernel, else by the decode kernel. before: what out and lse hold
    until a kernel writes there. stream: whose counters it has. hopper_sms: of one of Hopper's GPUs,
    where each tile has a cluster of `cluster` thread blocks, or of largest_cluster if that is less;
    0: an sm80 GPU. brings: the `new_rows` that the decode kernel writes itself, first. codes:
    `code_descales` of a cache of codes. The cache's head dims may be any; q's and out's are rounded
    up to multiples of 8.
    """
    b, seqlen_q, heads, _ = q.shape
    head_dim_v = -(-v_cache.shape[-1] // 8) * 8
    out_shape, lse_shape = (b, seqlen_q, heads, head_dim_v), (b, heads, seqlen_q)
    output = Outputs(before, out=(out_shape, q.dtype), lse=(lse_shape, torch.float32))
    call = _common(q, k_cache, v_cache, output.out, output.lse, causal, window_size, softmax_scale)
    chunk = 16 // k_cache.element_size()
    if k_cache.shape[-1] % chunk or v_cache.shape[-1] % chunk:
        call |= {"odd_columns_k": k_cache.shape[-1], "odd_columns_v": v_cache.shape[-1]}
        call |= {"head_dim_v": head_dim_v}
    call |= {"seqlen_q": seqlen_q}
    call |= cache(k_cache, b, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    call["new_k"] = new
    call |= codes or {}
    scores(call, **full)
    if num_splits is None:
        kernels.run(variant, call)
    else:
        call |= {"num_splits": num_splits, "last_block_first": last_block_first, "stream": stream}
        call |= (brings or {}) | {"hopper_sms": hopper_sms, "largest_cluster": largest_cluster}
        call["cluster"] = cluster
        kernels.run_decode(variant, call)
    return output.results()


def append(
    kernels: ModuleType,
    variant: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache_seqlens: Tensor,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    interleaved: bool = True,
    local: bool = True,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    codes: dict | None = None,
) -> Tensor:
    """Writes k and v into the cache; returns q as the attention needs it."""
    turned = poisoned(torch.full(q.shape, NAN, dtype=q.dtype))
    no_lse = torch.empty(0, 0)
    call = _common(q, k_cache, v_cache, turned, no_lse, False, (-1, -1), None)
    call |= cache(k_cache, q.shape[0], cache_seqlens, cache_batch_idx, None, block_table)
    call |= new_rows(turned, k, v, rotary_cos, rotary_sin, interleaved, local)
    call |= {"new_k": k.shape[1], "seqlen_q": q.shape[1]} | (codes or {})
    kernels.run_append(variant, call)
    if rotary_cos is None:
        assert turned._base.isnan().all()
        return q
    result = turned.clone()
    assert turned.fill_(NAN)._base.isnan().all()
    return result


def new_rows(
    turned: Tensor | None, k: Tensor, v: Tensor, rotary_cos: Tensor | None,
    rotary_sin: Tensor | None, interleaved: bool, local: bool,
) -> dict:  # fmt: skip
    """What a call brings to a cache; turned: where its queries go that turn, if anywhere."""
    rows = {"k_new": view(k), "v_new": view(v)}
    if turned is not None:
        rows["q_rotated"] = view(turned)
    if rotary_cos is not None:
        rows |= {
            "cos": rotary_cos.data_ptr(),
            "sin": rotary_sin.data_ptr(),
            "cos_stride": rotary_cos.stride(0),
            "sin_stride": rotary_sin.stride(0),
            "positions": rotary_cos.shape[0],
            "rotary_dim": 2 * rotary_cos.shape[1],
            "interleaved": interleaved,
            "advance_q": local,
        }
    return rows


def code_descales(
    k_descale: Tensor | float, v_descale: Tensor | float, q_descale: Tensor | float | None = None
) -> dict:
    """Scales of a cache of codes: a number, (batch, heads_k), or (the cache's rows, heads_k).

    q_descale: of q, which has codes then."""
    call: dict = {"codes": True, "codes_of_q": q_descale is not None}
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    for name, scale in scales.items():
        if scale is None:
            continue
        if not isinstance(scale, Tensor):
            call[f"{name}_all"] = scale
            continue
        of_rows = scale.dim() == 3
        row_stride = scale.stride(1) if of_rows else 0
        call[name] = (
            scale.data_ptr(), scale.stride(0), row_stride, scale.stride(-1), int(of_rows),
        )  # fmt: skip
    return call


def cache(k_cache, b, cache_seqlens, cache_batch_idx, cache_leftpad, block_table) -> dict:
    """Where the keys of each of b sequences are."""
    call = {"batch": b, "seqlen_k": k_cache.shape[1]}
    named = {"used_k": cache_seqlens, "leftpad_k": cache_leftpad, "batch_k": cache_batch_idx}
    call |= {name: x.data_ptr() for name, x in named.items() if x is not None}
    if cache_batch_idx is not None:
        call["batches_k"] = k_cache.shape[0]
    return call | (pages(k_cache, block_table) if block_table is not None else {})


def pages(k_cache: Tensor, block_table: Tensor) -> dict:
    return {
        "seqlen_k": block_table.shape[1] * k_cache.shape[1],
        "block_table": block_table.data_ptr(),
        "table_stride": block_table.stride(0),
        "per_sequence": block_table.shape[1],
        "page_size": k_cache.shape[1],
        "pages": k_cache.shape[0],
    }


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
    split_heads: int | None = None,
    kv_persistent: bool = False,
    ordered_dq: bool = False,
    computes_delta: bool = False,
    row_splits: tuple[int, int] = (0, 1),
    **full,
) -> tuple[Tensor, ...]:
    """softmax_d, the gradients that are wanted, and with s_aux its gradient.

    lengths: of `dense_lengths` or `varlen_lengths`. split_heads: query heads of a group that a tile
    of keys has; None: all. kv_persistent: a CTA, or a pair, takes all keys of a sequence.
    ordered_dq: that schedule. row_splits: so many of the last tiles, or all, in so many splits.
    NaN wherever no kernel wrote.
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
    call |= {
        "kv_persistent": kv_persistent,
        "ordered_dq": ordered_dq,
        "computes_delta": computes_delta,
    }
    call |= {"split_tiles": row_splits[0], "row_splits": row_splits[1]}
    if split_heads is not None:
        call["split_heads"] = split_heads
    if dlse is not None:
        call["dlse"] = rows(dlse)
    if "ds_aux" in like:
        call["ds_aux"] = output.ds_aux.data_ptr()
    kernels.run(variant, scores(call, **full))
    return output.results()


def dense_lengths(q: Tensor, k: Tensor) -> dict:
    return {"batch": q.shape[0], "seqlen_q": q.shape[1], "seqlen_k": k.shape[1]}


def varlen_lengths(
    q, k, cu_seqlens_q, cu_seqlens_k, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
) -> dict:  # fmt: skip
    """The tensors have to live as long as the result is used."""

    def longest(cu_seqlens: Tensor, said: int | None) -> int:
        return int(cu_seqlens.diff().max()) if said is None else said

    lengths = {
        "batch": len(cu_seqlens_q) - 1,
        "seqlen_q": longest(cu_seqlens_q, max_seqlen_q),
        "total_q": q.shape[0],
        "total_k": k.shape[0],
        "cu_q": cu_seqlens_q.data_ptr(),
    }
    if cu_seqlens_k is not None:  # else seqused_k says it, of keys in pages
        seqlen_k = longest(cu_seqlens_k, max_seqlen_k)
        lengths |= {"seqlen_k": seqlen_k, "cu_k": cu_seqlens_k.data_ptr()}
    return lengths if seqused_k is None else lengths | {"used_k": seqused_k.data_ptr()}


def problem(**shape: int) -> dict:
    """What the host chooses by, of a dense call without tensors."""
    nothing = (0, 0, 0, 0)
    return {
        "q": nothing,
        "k": nothing,
        "v": nothing,
        "out": nothing,
        "left": -1,
        "right": -1,
        "softmax_scale": 1.0,
        "head_dim": 128,
        "head_dim_v": 128,
    } | shape


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
