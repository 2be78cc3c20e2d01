"""Who is measured: this library, the back ends of torch's SDPA, and the standard formula.

Each contender is ``f(q, k, v, causal, window) -> out`` on (batch, seqlen, heads, head_dim) tensors
and may raise where it cannot do a point.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn

NO_WINDOW = (-1, -1)


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool, window=NO_WINDOW, **options) -> Tensor:
    return flash_attn.flash_attn_func(q, k, v, causal=causal, window_size=window, **options)


def standard(q: Tensor, k: Tensor, v: Tensor, causal: bool, window=NO_WINDOW) -> Tensor:
    """softmax(Q K^T) V with its whole score matrix."""
    if window != NO_WINDOW:
        raise NotImplementedError("the standard contender has no window")
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def sdpa(backend: SDPBackend | None) -> Callable:
    """torch's scaled_dot_product_attention, through one back end or torch's own choice (None)."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window=NO_WINDOW) -> Tensor:
        if window != NO_WINDOW:
            raise NotImplementedError("SDPA has no window")
        inputs = (t.transpose(1, 2) for t in (q, k, v))
        options = {"is_causal": causal, "enable_gqa": q.shape[2] != k.shape[2]}
        if backend is None:
            return F.scaled_dot_product_attention(*inputs, **options).transpose(1, 2)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*inputs, **options).transpose(1, 2)

    return attend


def peer_module(name: str) -> ModuleType | None:
    """A peer's module, if it is installed. This library under its name (flash-attn-3) is none."""
    try:
        found = importlib.import_module(name)
    except ImportError:
        return None
    return None if getattr(found, "SERVED_BY", None) == "flash_attn" else found


def fa3_module() -> ModuleType | None:
    return peer_module("flash_attn_interface")


def peer(module: ModuleType | None) -> Callable | None:
    """Another package's flash_attn_func, if it is installed."""
    attend = getattr(module, "flash_attn_func", None)
    if attend is None:
        return None

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, window=NO_WINDOW, **options) -> Tensor:
        out = attend(q, k, v, causal=causal, window_size=window, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


def dense(device: torch.device, with_standard: bool = False) -> dict[str, Callable]:
    """The contenders for dense forward and backward on a device."""
    chosen: dict[str, Callable | None] = {"ours": ours}
    if device.type == "cuda":
        chosen["fa3"] = peer(fa3_module())
        chosen["fa2"] = sdpa(SDPBackend.FLASH_ATTENTION)
        chosen["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    else:
        chosen["sdpa"] = sdpa(None)
    if with_standard:
        chosen["standard"] = standard
    return {name: attend for name, attend in chosen.items() if attend is not None}


def flex() -> Callable:
    """torch's FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    @lru_cache(maxsize=8)
    def causal_mask(rows: int, keys: int, device: torch.device):
        def sees(b, h, row, key):
            return row + (keys - rows) >= key

        return create_block_mask(sees, None, None, rows, keys, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window=NO_WINDOW) -> Tensor:
        if window != NO_WINDOW:
            raise NotImplementedError("the flex contender has no window")
        mask = causal_mask(q.shape[1], k.shape[1], q.device) if causal else None
        inputs = (t.transpose(1, 2) for t in (q, k, v))
        return compiled(*inputs, block_mask=mask).transpose(1, 2)

    return attend


def wide(device: torch.device) -> dict[str, Callable]:
    """What takes head dims above 256: torch's memory-efficient kernel, and FlexAttention where one
    of its tiles fits."""
    if device.type != "cuda":
        return {"ours": ours, "sdpa": sdpa(None)}
    return {"ours": ours, "efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION), "flex": flex()}


def packed(device: torch.device) -> dict[str, Callable]:
    """``f(q, k, v, ends, longest, causal)`` on packed sequences."""

    def call(attend: Callable, q, k, v, ends, longest, causal):
        out = attend(q, k, v, ends, ends, longest, longest, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    chosen = {"ours": partial(call, flash_attn.flash_attn_varlen_func)}
    fa3 = fa3_module()
    if fa3 is None:
        return chosen
    return chosen | {"fa3": partial(call, fa3.flash_attn_varlen_func)}


def repeatable(device: torch.device) -> dict[str, Callable]:
    """Dense contenders whose gradients are the same at every run, beside those that need not be."""
    chosen = {}
    for name, attend in dense(device).items():
        if name in ("ours", "fa3"):
            chosen[f"{name}, any order"] = attend
            chosen[name] = partial(attend, deterministic=True)
    return chosen


def with_cache(device: torch.device) -> dict[str, Callable]:
    """``f(q, k_cache, v_cache, cache_seqlens, block_table, **new_keys)`` for decoding."""

    def our_decode(q, k_cache, v_cache, cache_seqlens, block_table, **new_keys):
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table, causal=True,
            **new_keys,
        )  # fmt: skip

    chosen = {"ours": our_decode}
    fa3 = fa3_module()
    if fa3 is None:
        return chosen

    def fa3_decode(q, k_cache, v_cache, cache_seqlens, block_table, **new_keys):
        return fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=block_table, causal=True,
            **new_keys,
        )  # fmt: skip

    return chosen | {"fa3": fa3_decode}


def serving(device: torch.device, window: tuple[int, int]) -> dict[str, Callable]:
    """``f(*inputs)`` for what problems.Serve.inputs returns."""

    def our_step(q, k, v, cu_q, cu_k, max_q, max_k, used, table):
        return flash_attn.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max_q, max_k, causal=True, block_table=table, window_size=window
        )

    chosen = {"ours": our_step}
    fa3 = fa3_module()
    if fa3 is None:
        return chosen

    def fa3_step(q, k, v, cu_q, cu_k, max_q, max_k, used, table):
        return fa3.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, page_table=table, cu_seqlens_q=cu_q, max_seqlen_q=max_q,
            causal=True, window_size=window,
        )  # fmt: skip

    return chosen | {"fa3": fa3_step}
