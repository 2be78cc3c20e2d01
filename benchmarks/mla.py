"""Latent attention against pages, beside FlashMLA and FA3's `qv`, where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.clock import Clock, graphed
from benchmarks.contenders import peer_module
from benchmarks.rows import Options, Row, rate
from flash_attn import flash_attn_with_kvcache


@dataclass(frozen=True)
class Latent:
    """A step of generation over a full cache whose rows are `latent` and `rotated` columns."""

    batch: int
    seqlen: int
    queries: int
    heads: int
    page: int = 64
    latent: int = 512
    rotated: int = 64

    def __str__(self) -> str:
        return f"b{self.batch} s{self.seqlen} q{self.queries} h{self.heads} page {self.page}"

    @property
    def flops(self) -> float:
        rows = self.batch * self.queries * self.heads
        return 2.0 * rows * self.seqlen * (2 * self.latent + self.rotated)

    @property
    def cache_bytes(self) -> int:
        return 2 * self.batch * self.seqlen * (self.latent + self.rotated)

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q and pages of all columns, the latent ones first; lengths; block table."""
        like = {"device": device, "dtype": torch.bfloat16}
        columns, per_sequence = self.latent + self.rotated, -(-self.seqlen // self.page)
        q = torch.randn(self.batch, self.queries, self.heads, columns, **like)
        count = self.batch * per_sequence
        pages = torch.randn(count, self.page, 1, columns, **like)
        order = torch.randperm(count, device=device, dtype=torch.int32)
        used = torch.full((self.batch,), self.seqlen, device=device, dtype=torch.int32)
        return q, pages, used, order.view(self.batch, per_sequence)


def grid() -> Iterator[Latent]:
    """Heads of a whole model, and of a rank of eight."""
    for heads in (128, 16):
        for batch, seqlen, queries in (
            (1, 4096, 1), (16, 4096, 1), (64, 4096, 1), (128, 4096, 1), (32, 16384, 1),
            (128, 8192, 2), (1, 131072, 1), (64, 4096, 2),
        ):  # fmt: skip
            yield Latent(batch, seqlen, queries, heads)


def steps(point: Latent, device: torch.device) -> dict[str, Callable]:
    """The call of each contender, each with its own scheduling."""
    q, pages, used, table = point.inputs(device)
    latent = point.latent
    parts = q[..., latent:], pages[..., latent:], pages[..., :latent]
    calls: dict[str, Callable] = {
        "ours": lambda: flash_attn_with_kvcache(
            *parts, qv=q[..., :latent], cache_seqlens=used, block_table=table, causal=True
        )
    }
    if (fa3 := peer_module("flash_attn_interface")) is not None:
        calls["fa3"] = lambda: fa3.flash_attn_with_kvcache(
            *parts, qv=q[..., :latent], cache_seqlens=used, page_table=table, causal=True
        )
    if (flashmla := peer_module("flash_mla")) is not None:
        per_key_head = point.queries * point.heads

        def by_flashmla():
            prepared = flashmla.get_mla_metadata(used, per_key_head, 1)
            return flashmla.flash_mla_with_kvcache(
                q, pages, table, used, latent, *prepared, causal=True
            )

        calls["flashmla"] = by_flashmla
    return calls


def mla(options: Options) -> Iterator[Row]:
    """Replayed from a CUDA graph. Rates are of products with 128 heads, of bytes with 16; "read":
    torch's sum of as many bytes."""
    clock = Clock(options.device)
    for point in grid():
        if options.seqlens and point.seqlen not in options.seqlens:
            continue
        calls = steps(point, options.device)
        calls["read"] = torch.zeros(point.cache_bytes // 4, device=options.device).sum
        times = clock.measure({n: graphed(fn) for n, fn in calls.items()}, min_samples=20)
        by_bytes = point.heads <= 16
        unit, amount = ("GB/s", point.cache_bytes) if by_bytes else ("TFLOP/s", point.flops)
        rates = rate(amount, 1e9 if by_bytes else 1e12, times)
        yield Row("mla", f"graph {point}", unit, times, rates)
