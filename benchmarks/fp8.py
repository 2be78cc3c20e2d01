"""Codes of 8 bits beside 16: caches, in steps of an engine and steps that append; and forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.clock import Clock, graphed
from benchmarks.problems import NO_WINDOW, Serve, Step, gpu_grid, latent_grid
from benchmarks.rows import Options, Row, rate
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.fp8 import attention

FP8 = torch.float8_e4m3fn
DESCALE = 0.01
#: So many queries of a sequence are a chunk of a prompt, whose queries may become codes as well.
CHUNK = 128


def grid() -> Iterator[Serve]:
    """Decoding, drafts, chunks of prompts; heads and head dims of published models."""
    generator = torch.Generator().manual_seed(5)
    mixed = tuple(torch.randint(16, 8193, (256,), generator=generator).tolist())
    for name, queries, keys in (
        ("64 x 1 query, 4k keys", 1, (4096,) * 64),
        ("256 x 1 query, 16 to 8k keys", 1, mixed),
        ("8 x 1 query, 32k keys", 1, (32768,) * 8),
        ("8 x 1 query, 2k keys", 1, (2048,) * 8),
        ("1 x 1 query, 32k keys", 1, (32768,)),
        ("64 x 4 queries, 4k keys", 4, (4096,) * 64),
        ("1 x 512 queries, 8k keys", 512, (8192,)),
        ("4 x 1,024 queries, 8k keys", 1024, (8192,) * 4),
        ("1 x 2,048 queries, 32k keys", 2048, (32768,)),
    ):
        yield Serve(name, (queries,) * len(keys), keys, 64)
    one = Serve("", (1,) * 64, (4096,) * 64, 64)
    for heads, heads_kv, d in ((64, 8, 64), (16, 16, 128), (64, 8, 128), (32, 4, 96), (16, 8, 256)):
        name = f"64 x 1 query, 4k keys, {heads}/{heads_kv} heads, d {d}"
        yield replace(one, name=name, heads=heads, heads_kv=heads_kv, head_dim=d)


def steps() -> Iterator[Step]:
    for batch, seqlen in ((8, 2048), (64, 4096)):
        yield Step(batch, seqlen, 32, 8, 1, True)


def codes_of(x: Tensor) -> Tensor:
    return (x / DESCALE).clamp(-448, 448).to(FP8)


def _serving(point: Serve, device: torch.device) -> dict[str, Callable]:
    q, k, v, *rest, table = point.inputs(device)
    batch, heads = len(point.keys), point.heads_kv
    of_head = torch.full((batch, heads), DESCALE, device=device)
    of_row = torch.full(k.shape[:-1], DESCALE, device=device)
    codes = [codes_of(x) for x in (k, v)]
    lengths = rest[:4]

    def step(k: Tensor, v: Tensor, **descales) -> Callable:
        return lambda: flash_attn_varlen_func(
            q, k, v, *lengths, causal=True, block_table=table, window_size=NO_WINDOW, **descales
        )

    calls = {
        "16 bits": step(k, v),
        "fp8": step(*codes, k_descale=of_head, v_descale=of_head),
        "fp8, scales of rows": step(*codes, k_descale=of_row, v_descale=of_row),
    }
    if max(point.queries) >= CHUNK:
        calls["fp8 products"] = step(
            *codes, k_descale=of_head, v_descale=of_head, fp8_products=True
        )
    return calls


def _appending(point: Step, device: torch.device) -> dict[str, Callable]:
    q, k, v, used, table = point.inputs(device)
    new = point.new_keys(device)
    codes = [codes_of(x) for x in (k, v)]
    descale = torch.full((point.batch, point.heads_kv), DESCALE, device=device)
    before = used - point.new

    def step(k: Tensor, v: Tensor, **descales) -> Callable:
        return lambda: flash_attn_with_kvcache(
            q, k, v, cache_seqlens=before, block_table=table, causal=True, **new, **descales
        )

    return {
        "16 bits": step(k, v),
        "fp8": step(*codes, k_descale=descale, v_descale=descale),
    }


def fp8(options: Options) -> Iterator[Row]:
    """Replayed from a CUDA graph; rates are of the keys and values in 8 bits, each once, so that
    that of "16 bits" is half of its bytes'. "read": torch's sum of the bytes in 8 bits."""
    clock = Clock(options.device)
    for points, calls_of in ((grid(), _serving), (steps(), _appending)):
        for point in points:
            calls = calls_of(point, options.device)
            as_many = torch.zeros(point.cache_bytes // 8, device=options.device)
            calls["read"] = as_many.sum
            times = clock.measure({n: graphed(fn) for n, fn in calls.items()}, min_samples=20)
            rates = rate(point.cache_bytes // 2, 1e9, times)
            yield Row("fp8", f"graph {point}", "GB/s", times, rates)


def fp8_forward(options: Options) -> Iterator[Row]:
    """Queries, keys and values of codes whose products are of codes too, beside bf16."""
    clock = Clock(options.device)
    dims = options.dims or {64, 96, 128, 192, 256}
    points = [*gpu_grid(dims, options.seqlens, gqa=False), *latent_grid(dims)]
    for calls_of, kind, own in (
        (_forwards, "fwd", points),
        (_from_16_bits, "from 16 bits:", [p for p in points if p.head_dim == 128]),
        (_layouts, "layouts:", [p for p in points if p.seqlen in (2048, 8192)]),
    ):
        for point in own:
            inputs = point.inputs(options.device, grad=False)
            times = clock.measure(calls_of(inputs, point.causal))
            rates = rate(point.flops("fwd"), 1e12, times)
            yield Row("fp8_forward", f"{kind} {point}", "TFLOP/s", times, rates)


def _forwards(inputs: tuple[Tensor, ...], causal: bool) -> dict[str, Callable]:
    codes = [x.to(FP8) for x in inputs]
    return {
        "fp8": lambda: flash_attn_func(*codes, causal=causal, fp8_products=True),
        "bf16": lambda: flash_attn_func(*inputs, causal=causal),
    }


def _from_16_bits(inputs: tuple[Tensor, ...], causal: bool) -> dict[str, Callable]:
    """Codes are made in the call."""
    return {
        "fp8": lambda: attention(*inputs, causal=causal, fp8_products=True),
        "bf16": lambda: flash_attn_func(*inputs, causal=causal),
    }


def _layouts(inputs: tuple[Tensor, ...], causal: bool) -> dict[str, Callable]:
    """The same sequences one after the other, and their keys in pages, whose order is random."""
    codes = [x.to(FP8) for x in inputs]
    batch, length = inputs[0].shape[:2]
    device = inputs[0].device
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    packed = [x.flatten(0, 1) for x in codes]

    def in_pages(rows: int) -> Callable:
        pages = batch * length // rows
        order = torch.randperm(pages, device=device).to(torch.int32)
        k, v = (torch.empty_like(x).unflatten(0, (pages, rows)) for x in packed[1:])
        k[order], v[order] = (x.unflatten(0, (pages, rows)) for x in packed[1:])
        table = order.view(batch, -1)
        return lambda: flash_attn_varlen_func(
            packed[0], k, v, ends, ends, length, length, causal=causal, block_table=table,
            fp8_products=True,
        )  # fmt: skip

    return {
        "fp8": lambda: flash_attn_func(*codes, causal=causal, fp8_products=True),
        "packed": lambda: flash_attn_varlen_func(
            *packed, ends, ends, length, length, causal=causal, fp8_products=True
        ),
        "pages of 64": in_pages(64),
        "pages of 16": in_pages(16),
    }
