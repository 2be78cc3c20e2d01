"""Rotary embedding beside a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.clock import Clock
from benchmarks.rows import Options, Row, rate
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_qk, apply_rotary_emb_qkv_


@dataclass(frozen=True)
class Rotary:
    """One call on q and k, on q alone where k has no heads, or on qkv where that is its name."""

    name: str
    batch: int = 4
    seqlen: int = 4096
    heads: int = 32
    heads_k: int = 8
    head_dim: int = 128
    rotary_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    tables: torch.dtype = torch.float32
    interleaved: bool = False
    inplace: bool = False
    sequences: int = 0  # packed ones, of seqlen // sequences tokens

    def __str__(self) -> str:
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]
        return (
            f"{self.name}: d{self.head_dim} b{self.batch} s{self.seqlen} "
            f"h{self.heads}/{self.heads_k} {dtype}{' in place' if self.inplace else ''}"
        )

    @property
    def moved(self) -> int:
        """Bytes of q and k, read and written; what does not turn in place is not touched."""
        channels = self.rotary_dim if self.inplace else self.head_dim
        heads = self.heads + self.heads_k
        return 2 * self.batch * self.seqlen * heads * channels * self.dtype.itemsize

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lead = (self.batch * self.seqlen,) if self.sequences else (self.batch, self.seqlen)
        q, k = (
            torch.randn(*lead, h, self.head_dim, device=device, dtype=self.dtype)
            for h in (self.heads, self.heads_k)
        )
        angles = torch.rand(self.seqlen, self.rotary_dim // 2, device=device)
        return q, k, angles.cos().to(self.tables), angles.sin().to(self.tables)

    def ends(self, device: torch.device) -> Tensor | None:
        if not self.sequences:
            return None
        total = self.batch * self.seqlen
        return torch.linspace(0, total, self.sequences + 1, device=device).to(torch.int32)


def grid() -> Iterator[Rotary]:
    for inplace in (False, True):
        yield Rotary("q and k", inplace=inplace)
        yield Rotary("q and k, interleaved", interleaved=True, inplace=inplace)
        yield Rotary("q and k, bf16 tables", tables=torch.bfloat16, inplace=inplace)
        yield Rotary("q and k, half of d turns", rotary_dim=64, inplace=inplace)
    yield Rotary("q and k, 64 packed", sequences=64)
    yield Rotary("q and k, 1,024 packed", sequences=1024)
    yield Rotary("q and k", head_dim=64, rotary_dim=64, heads=64, heads_k=16)
    yield Rotary("q and k", head_dim=256, rotary_dim=256, heads=16, heads_k=4)
    yield Rotary("q and k", dtype=torch.float32)
    yield Rotary("q", heads_k=0)
    yield Rotary("qkv", heads=16, heads_k=16, inplace=True)
    yield Rotary("a decoding step", batch=64, seqlen=1, inplace=True)


def _rotate(point: Rotary, inputs: tuple) -> Callable:
    q, k, *tables = inputs
    place = {"interleaved": point.interleaved, "inplace": point.inplace}
    place["cu_seqlens"] = point.ends(q.device)
    if point.name == "qkv":
        qkv = torch.stack((q, k, k), dim=2)
        return lambda: apply_rotary_emb_qkv_(qkv, *tables)
    if not point.heads_k:
        return lambda: apply_rotary_emb(q, *tables, **place)
    return lambda: apply_rotary_emb_qk(q, k, *tables, **place)


def _on_torch(rotate: Callable) -> Callable:
    """The same on torch's operations, as the compiler gets them."""
    return torch.compile(rotate, dynamic=False)


def _copy(point: Rotary, device: torch.device) -> Callable:
    source = torch.empty(point.moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def rotary(options: Options) -> Iterator[Row]:
    """Rates are of q's and k's bytes, read and written once. With the standard formula: torch's
    operations, compiled."""
    clock = Clock(options.device, clean=True)
    for point in grid():
        if options.dims and point.head_dim not in options.dims:
            continue
        ours = _rotate(point, point.inputs(options.device))
        calls = {"ours": ours, "copy": _copy(point, options.device)}
        if options.with_standard:
            calls["compiled"] = _on_torch(ours)
        with torch.no_grad():
            times = clock.measure(calls, min_samples=20)
        yield Row("rotary", f"rotary {point}", "GB/s", times, rate(point.moved, 1e9, times))
