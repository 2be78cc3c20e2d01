"""KV cache calls: a `CacheCase` becomes caches full of NaN but for the keys, and the references."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from cases import BF16, FP32, poisoned
from reference import random_slopes
from reference_cache import kvcache_ref
from torch import Tensor

from flash_attn import flash_attn_with_kvcache

NAN = float("nan")


@dataclass(frozen=True)
class CacheCase:
    name: str
    dtype: torch.dtype = BF16
    b: int = 3
    sq: int = 1
    h: int = 4
    hk: int = 2
    d: int = 64
    dv: int | None = None
    cache_size: int = 150
    cache_seqlens: tuple[int, ...] = (37, 128, 3)
    new: int = 0
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None
    sinks: bool = False
    rotary_dim: int = 0
    interleaved: bool = True
    page_size: int = 0  # 0: one contiguous cache per sequence
    leftpad: tuple[int, ...] | None = None
    batch_idx: bool = False
    scale: float | None = None

    @property
    def features(self) -> set[str]:
        named = {
            "kvcache": True,
            "paged": self.page_size > 0,
            "leftpad": self.leftpad is not None,
            "softcap": self.softcap > 0,
            "alibi": self.alibi is not None,
            "sinks": self.sinks,
            "fp32": self.dtype == FP32,
        }
        return {name for name, wanted in named.items() if wanted}


@dataclass
class CacheInputs:
    q: Tensor  # (b, sq, h, d)
    k_cache: Tensor  # (pages or batch, rows, hk, d), NaN wherever no sequence has a key
    v_cache: Tensor
    k: Tensor | None  # (b, new, hk, d)
    v: Tensor | None
    extra: dict = field(repr=False)  # the optional tensor arguments

    def clone(self) -> CacheInputs:
        return replace(self, k_cache=recreate(self.k_cache), v_cache=recreate(self.v_cache))


def recreate(x: Tensor) -> Tensor:
    """A copy with the same strides in a new poisoned buffer."""
    return poisoned(x, fill=7.0)


def page_table(case: CacheCase, gen: torch.Generator) -> tuple[Tensor, int]:
    """Shuffled pages for every sequence's final length, -1 past it; and the number of pages."""
    needed = [-(-(max(n, 0) + case.new) // case.page_size) for n in case.cache_seqlens]
    pages = sum(needed) + 2
    order = torch.randperm(pages, generator=gen).tolist()
    table = torch.full((case.b, max(needed) + 1), -1, dtype=torch.int32)
    for b, count in enumerate(needed):
        if case.cache_seqlens[b] < 0:
            continue
        for n in range(count):
            table[b, n] = order.pop()
    return table, pages


def make_cache(case: CacheCase, device) -> CacheInputs:
    gen = torch.Generator().manual_seed(len(case.name))
    dv = case.d if case.dv is None else case.dv

    def normal(*shape):
        return torch.randn(shape, generator=gen).to(case.dtype).to(device)

    extra: dict = {}
    rows, first = case.cache_size, case.b
    if case.page_size:
        table, first = page_table(case, gen)
        extra["block_table"] = table.to(device)
        rows = case.page_size
    elif case.batch_idx:
        first = case.b + 3
        order = torch.randperm(first, generator=gen)[: case.b]
        extra["cache_batch_idx"] = order.to(torch.int32).to(device)
    k_cache = torch.full((first, rows, case.hk, case.d), NAN, dtype=case.dtype, device=device)
    v_cache = torch.full((first, rows, case.hk, dv), NAN, dtype=case.dtype, device=device)
    for b, length in enumerate(case.cache_seqlens):
        begin = case.leftpad[b] if case.leftpad else 0
        for n in range(begin, length):
            where = (b, n)
            if case.page_size:
                where = (int(extra["block_table"][b, n // case.page_size]), n % case.page_size)
            elif case.batch_idx:
                where = (int(extra["cache_batch_idx"][b]), n)
            k_cache[where], v_cache[where] = normal(case.hk, case.d), normal(case.hk, dv)
    if case.leftpad:
        extra["cache_leftpad"] = torch.tensor(case.leftpad, dtype=torch.int32, device=device)
    if case.alibi:
        shape = (case.h,) if case.alibi == "h" else (case.b, case.h)
        extra["alibi_slopes"] = random_slopes(shape, gen).to(device)
    if case.sinks:
        extra["s_aux"] = torch.randn(case.h, generator=gen).to(device)
    if case.rotary_dim:
        positions = torch.arange(max(case.cache_size, 700), dtype=torch.float64)[:, None]
        channel = torch.arange(case.rotary_dim // 2, dtype=torch.float64)
        angle = positions * 100.0 ** (-channel * 2 / case.rotary_dim)
        extra["rotary_cos"] = angle.cos().to(case.dtype).to(device)
        extra["rotary_sin"] = angle.sin().to(case.dtype).to(device)
    new = case.new > 0
    return CacheInputs(
        poisoned(normal(case.b, case.sq, case.h, case.d)),
        poisoned(k_cache, fill=7.0),
        poisoned(v_cache, fill=7.0),
        poisoned(normal(case.b, case.new, case.hk, case.d)) if new else None,
        poisoned(normal(case.b, case.new, case.hk, dv)) if new else None,
        extra,
    )


def run_cached(case: CacheCase, x: CacheInputs, **more):
    lengths = torch.tensor(case.cache_seqlens, dtype=torch.int32, device=x.q.device)
    return flash_attn_with_kvcache(
        x.q,
        x.k_cache,
        x.v_cache,
        x.k,
        x.v,
        **{"cache_seqlens": lengths, **x.extra, **more},
        softmax_scale=case.scale,
        causal=case.causal,
        window_size=case.window,
        softcap=case.softcap,
        rotary_interleaved=case.interleaved,
        return_softmax_lse=True,
    )


def expected(case: CacheCase, x: CacheInputs, attention, **more):
    extra = {**x.extra, **more}
    extra.pop("cache_leftpad", None)
    return kvcache_ref(
        attention,
        x.q,
        x.k_cache,
        x.v_cache,
        k=x.k,
        v=x.v,
        cache_seqlens=list(case.cache_seqlens),
        cache_leftpad=case.leftpad,
        causal=case.causal,
        window_size=case.window,
        rotary_interleaved=case.interleaved,
        softmax_scale=case.scale,
        softcap=case.softcap,
        **extra,
    )
