"""What is measured: the shapes of each preset, their inputs and their operation counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.contenders import NO_WINDOW
from flash_attn import flash_attn_varlen_func


@dataclass(frozen=True)
class Dense:
    """One call on (batch, seqlen, heads, head_dim) tensors."""

    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16
    window: tuple[int, int] = NO_WINDOW
    head_dim_v: int | None = None  # of V, where it is another

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        if self.window != NO_WINDOW:
            mask += f" w{self.window[0] + 1}"
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]
        dims = f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        return f"d{dims} b{self.batch} s{self.seqlen} h{self.heads}/{self.heads_kv} {dtype} {mask}"

    def inputs(self, device: torch.device, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(1)

        def normal(heads: int, head_dim: int) -> Tensor:
            shape = (self.batch, self.seqlen, heads, head_dim)
            t = torch.randn(shape, device=device, dtype=self.dtype, generator=generator)
            return t.requires_grad_(grad)

        d, dv = self.head_dim, self.head_dim_v or self.head_dim
        return normal(self.heads, d), normal(self.heads_kv, d), normal(self.heads_kv, dv)

    def flops(self, what: str) -> float:
        """Operations of the pairs that the mask lets through. A forward has two products, one of
        them with V's columns; a backward has five, two of them with V's columns."""
        s, left = self.seqlen, self.window[0]
        if not self.causal:
            pairs = s * s
        elif self.window == NO_WINDOW:
            pairs = s * (s + 1) / 2
        else:
            pairs = sum(min(i, left) + 1 for i in range(s))
        d, dv = self.head_dim, self.head_dim_v or self.head_dim
        columns = {"fwd": d + dv, "bwd": 3 * d + 2 * dv, "fwd+bwd": 4 * d + 3 * dv}[what]
        return 2 * self.batch * self.heads * pairs * columns


HEADS_OF_DIM = {64: 32, 96: 20, 128: 16, 192: 12, 256: 8}


def gpu_grid(dims: set[int] | None, seqlens: set[int] | None, gqa: bool) -> Iterator[Dense]:
    """16k tokens per call at every head dimension, full and causal."""
    for d, heads in HEADS_OF_DIM.items():
        if dims and d not in dims:
            continue
        for s in (512, 1024, 2048, 4096, 8192, 16384):
            if seqlens and s not in seqlens:
                continue
            for causal in (False, True):
                yield Dense(max(1, 16384 // s), s, heads, heads, d, causal)
        if gqa:
            yield Dense(2, 8192, heads, max(1, heads // 4), d, True)


def latent_grid(dims: set[int] | None) -> Iterator[Dense]:
    """What models with latent attention train with: V of fewer columns than Q and K."""
    if not dims or 192 in dims:
        for s in (1024, 4096, 8192):
            for causal in (False, True):
                yield Dense(16384 // s, s, 16, 16, 192, causal, head_dim_v=128)


def wide_grid(dims: set[int] | None) -> Iterator[Dense]:
    """Head dims that no other kernel was made for; Gemma 4 has 512."""
    for d in (320, 512):
        if not dims or d in dims:
            for s in (512, 1024, 4096, 8192):
                for causal in (False, True):
                    yield Dense(16384 // s, s, 8, 8, d, causal)


def head_dims(dims: set[int] | None) -> Iterator[Dense]:
    for d in range(32, 257, 16):
        if not dims or d in dims:
            yield Dense(4, 4096, 2048 // d, 2048 // d, d, True)


def lengths(device: torch.device, seqlens: set[int] | None) -> Iterator[Dense]:
    """One sequence. A CPU does the shorter ones."""
    on_gpu = device.type == "cuda"
    dtype, heads = (torch.bfloat16, 16) if on_gpu else (torch.float32, 2)
    for s in (512 << i for i in range(9 if on_gpu else 4)):
        if not seqlens or s in seqlens:
            yield Dense(1, s, heads, heads, 128, True, dtype)


def windows(dims: set[int] | None) -> Iterator[Dense]:
    """A sliding window of 1,024 keys."""
    for batch, s, heads, d in ((1, 16384, 32, 64), (1, 16384, 16, 128), (2, 8192, 8, 256)):
        if not dims or d in dims:
            yield Dense(batch, s, heads, heads, d, True, window=(1023, 0))


def score_grid(dims: set[int] | None, seqlen: int = 4096) -> Iterator[Dense]:
    for d, heads in HEADS_OF_DIM.items():
        if not dims or d in dims:
            yield Dense(16384 // seqlen, seqlen, heads, heads, d, True)


def score_mods(point: Dense, device: torch.device) -> dict[str, dict]:
    """Keywords of a call, by name."""
    slopes = 2.0 ** -torch.linspace(0, 8, point.heads, device=device)
    return {
        "plain": {},
        "softcap": {"softcap": 50.0},
        "alibi": {"alibi_slopes": slopes},
        "sinks": {"s_aux": torch.zeros(point.heads, device=device)},
        "dropout": {"dropout_p": 0.1},
    }


def cpu_grid(dims: set[int] | None, seqlens: set[int] | None) -> Iterator[Dense]:
    """Dense causal attention at sizes that a CPU trains with."""
    for dtype in (torch.float32, torch.bfloat16):
        for d in (64, 128):
            for s in (512, 1024, 2048):
                if (not dims or d in dims) and (not seqlens or s in seqlens):
                    yield Dense(max(1, 2048 // s), s, 256 // d, 256 // d, d, True, dtype)


@dataclass(frozen=True)
class Varlen:
    """Sequences of several lengths, packed, and a batch of as many tokens of one length."""

    name: str
    lengths: tuple[int, ...]
    dense: Dense

    def __str__(self) -> str:
        return f"{self.name}: {self.dense}"

    def flops(self, what: str) -> float:
        """Operations of all sequences."""
        pairs = sum(n * (n + 1) / 2 if self.dense.causal else n * n for n in self.lengths)
        products = {"fwd": 2, "bwd": 5}[what]
        return 2 * self.dense.heads * self.dense.head_dim * pairs * products

    def inputs(self, device: torch.device, grad: bool) -> tuple:
        """q, k and v, each [tokens, heads, head_dim], where sequences end, and the longest."""
        q, k, v = (
            x.flatten(0, 1).detach()[: sum(self.lengths)].requires_grad_(grad)
            for x in self.dense.inputs(device, grad=False)
        )
        ends = torch.tensor((0, *self.lengths), device=device).cumsum(0, dtype=torch.int32)
        return q, k, v, ends, max(self.lengths)


def random_lengths(total: int, longest: int) -> tuple[int, ...]:
    """The same at every run."""
    generator = torch.Generator().manual_seed(3)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(torch.randint(1, longest + 1, (1,), generator=generator))))
    return tuple(lengths)


def zipf_lengths(total: int, longest: int) -> tuple[int, ...]:
    """The i-th longest has longest / i tokens, at least 16; in an order that says nothing."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, max(16, longest // (len(lengths) + 1))))
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(3))
    return tuple(lengths[i] for i in order)


def varlen_grid(dims: set[int] | None) -> Iterator[Varlen]:
    """32k tokens in sequences of random, skewed and very short lengths."""
    tokens = 32768
    distributions = {
        "256 on average": (random_lengths(tokens, 512), 256),
        "2k on average": (random_lengths(tokens, 4096), 2048),
        "zipf": (zipf_lengths(tokens, 8192), 2048),
        "one of 16k, 256 of 64": ((16384, *(64,) * 256), 16384),
        "34 each": ((34,) * 960, 34),
    }
    for d, heads in HEADS_OF_DIM.items():
        if dims and d not in dims:
            continue
        for causal in (False, True):
            for name, (lengths, like) in distributions.items():
                batch = -(-sum(lengths) // like)
                yield Varlen(name, lengths, Dense(batch, like, heads, heads, d, causal))


@dataclass(frozen=True)
class Decode:
    """One step of generation over a full cache."""

    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    new: int
    paged: bool
    head_dim: int = 128
    page: int = 64

    def __str__(self) -> str:
        layout = f"pages of {self.page}" if self.paged else "dense"
        return f"b{self.batch} s{self.seqlen} h{self.heads}/{self.heads_kv} new {self.new} {layout}"

    @property
    def cache_bytes(self) -> int:
        return 2 * self.batch * self.seqlen * self.heads_kv * self.head_dim * 2

    def inputs(self, device: torch.device) -> tuple:
        generator = torch.Generator(device).manual_seed(2)
        like = {"device": device, "dtype": torch.bfloat16}
        q = torch.randn(
            self.batch, self.new, self.heads, self.head_dim, generator=generator, **like
        )
        pages = (self.batch, self.seqlen)
        table = None
        if self.paged:
            per_sequence = self.seqlen // self.page
            pages = (self.batch * per_sequence, self.page)
            order = torch.randperm(pages[0], device=device, dtype=torch.int32)
            table = order.view(self.batch, per_sequence)
        k_cache = torch.randn(*pages, self.heads_kv, self.head_dim, **like)
        v_cache = torch.randn_like(k_cache)
        used = torch.full((self.batch,), self.seqlen, device=device, dtype=torch.int32)
        return q, k_cache, v_cache, used, table


def decode_grid() -> Iterator[Decode]:
    for shape in (
        (1, 1024, 32, 8, 1),
        (8, 1024, 32, 8, 1),
        (1, 8192, 32, 8, 1),
        (1, 65536, 32, 8, 1),
        (8, 8192, 32, 8, 1),
        (64, 4096, 32, 8, 1),
        (128, 8192, 32, 8, 1),
        (16, 8192, 32, 32, 1),
        (16, 16384, 64, 8, 1),
        (32, 8192, 16, 1, 1),
        (16, 8192, 32, 8, 4),
    ):
        for paged in (False, True):
            yield Decode(*shape, paged)


@dataclass(frozen=True)
class Serve:
    """One step of an engine: packed queries, keys in pages, whose order is random."""

    name: str
    queries: tuple[int, ...]  # of each sequence
    keys: tuple[int, ...]
    page: int
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    window: tuple[int, int] = NO_WINDOW

    def __str__(self) -> str:
        return f"{self.name}, page {self.page}"

    @property
    def cache_bytes(self) -> int:
        return 2 * sum(self.keys) * self.heads_kv * self.head_dim * 2

    def inputs(self, device: torch.device) -> tuple:
        """q, k and v in pages, cu_seqlens_q, cu_seqlens_k, both longest, lengths, block table."""
        generator = torch.Generator(device).manual_seed(4)
        like = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        q = torch.randn(sum(self.queries), self.heads, self.head_dim, **like)
        needed = [-(-n // self.page) for n in self.keys]
        order = torch.randperm(sum(needed), device=device, generator=generator)
        table = torch.zeros(len(needed), max(needed), dtype=torch.int32, device=device)
        for b, pages in enumerate(order.split(needed)):
            table[b, : len(pages)] = pages
        shape = (sum(needed), self.page, self.heads_kv, self.head_dim)
        k, v = (torch.randn(shape, **like) for _ in "kv")
        used = torch.tensor(self.keys, dtype=torch.int32, device=device)
        ends = [
            torch.tensor((0, *lengths), device=device).cumsum(0, dtype=torch.int32)
            for lengths in (self.queries, self.keys)
        ]
        return q, k, v, *ends, max(self.queries), max(self.keys), used, table

    def without_pages(self, inputs: tuple) -> Callable:
        """Our call with as many keys, packed."""
        q, k, v, cu_q, cu_k, max_q, max_k, _, _ = inputs
        k, v = (x.flatten(0, 1)[: sum(self.keys)] for x in (k, v))
        return lambda: flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max_q, max_k, causal=True, window_size=self.window
        )


def serve_grid() -> Iterator[Serve]:
    """Decoding, verification of drafts, chunks of prompts, and both in a batch."""

    def each(name: str, queries: int, keys: tuple[int, ...], page: int) -> Serve:
        return Serve(name, (queries,) * len(keys), keys, page)

    generator = torch.Generator().manual_seed(5)
    mixed_keys = tuple(torch.randint(16, 8193, (256,), generator=generator).tolist())
    for page in (16, 256):
        yield each("64 x 1 query, 4k keys", 1, (4096,) * 64, page)
        yield each("256 x 1 query, 16 to 8k keys", 1, mixed_keys, page)
        yield each("8 x 1 query, 2k keys", 1, (2048,) * 8, page)
        yield each("63 x 1 query, 512 keys, one of 128k", 1, (131072, *(512,) * 63), page)
        yield each("64 x 4 queries, 4k keys", 4, (4096,) * 64, page)
        for queries in (1, 4, 8):
            yield each(f"1 x {queries} queries, 32k keys", queries, (32768,), page)
        yield each("63 x 1 query, 4k keys", 1, (4096,) * 63, page)
        yield each("1 x 512 queries, 4k keys", 512, (4096,), page)
        yield Serve("1 x 512 queries and 63 x 1, 4k keys", (512, *(1,) * 63), (4096,) * 64, page)
        yield each("1 x 128 queries, 4k keys", 128, (4096,), page)
        yield each("1 x 512 queries, 8k keys", 512, (8192,), page)
        yield each("1 x 1,024 queries, 16k keys", 1024, (16384,), page)
        yield each("1 x 2,048 queries, 32k keys", 2048, (32768,), page)
    # Drafts that are verified at long context, and one that looks back by a window.
    for keys in (31 * 1024, 144 * 1024):
        for queries in (1, 2, 4, 8):
            yield each(f"1 x {queries} queries, {keys // 1024}k keys", queries, (keys,), 16)
    yield Serve(
        "1 x 8 queries, 8k keys, 8/2 heads, window of 2,048",
        (8,), (8192,), 16, heads=8, heads_kv=2, window=(2047, 0),
    )  # fmt: skip


@dataclass(frozen=True)
class Step(Decode):
    """A step of generation: a new key for each sequence, which turns, as its query does."""

    def __str__(self) -> str:
        return f"step {super().__str__()}"

    def new_keys(self, device: torch.device) -> dict:
        """Keywords of flash_attn_with_kvcache, ours and FA3's, that append and turn."""
        like = {"device": device, "dtype": torch.bfloat16}
        new = torch.randn(2, self.batch, self.new, self.heads_kv, self.head_dim, **like)
        tables = torch.randn(2, self.seqlen, self.head_dim // 2, **like)
        return {"k": new[0], "v": new[1], "rotary_cos": tables[0], "rotary_sin": tables[1]}


def step_grid() -> Iterator[Step]:
    for batch, seqlen in ((8, 2048), (64, 4096), (1, 32768)):
        for paged in (False, True):
            yield Step(batch, seqlen, 32, 8, 1, paged)
