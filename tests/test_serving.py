"""What an engine does to a paged cache: sequences that grow, leave and make room, chunks of prompts
beside single tokens, graphs that are replayed with other lengths."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cases import BF16
from compare import assert_accurate, assert_bitwise
from reference import attention_ref, standard_attention, varlen_ref
from torch import Tensor

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

NAN = float("nan")
HEADS, HEADS_KV, DIM = 8, 2, 64


def ints(values, device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@dataclass
class Cache:
    """Pages [pages, page, hk, d] of K and V, NaN wherever no key is, with a page before and one
    behind that no kernel may touch; and the same keys in a row for each sequence."""

    held: tuple[Tensor, Tensor]
    free: list[int]
    pages: list[list[int]]
    rows: list[list[Tensor]]  # (2, hk, d) each

    @classmethod
    def empty(cls, sequences: int, pages: int, page: int, device) -> Cache:
        shape = (pages + 2, page, HEADS_KV, DIM)
        held = tuple(torch.full(shape, NAN, dtype=BF16, device=device) for _ in "kv")
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(pages)).tolist()
        return cls(held, order, [[] for _ in range(sequences)], [[] for _ in range(sequences)])

    @property
    def page(self) -> int:
        return self.held[0].shape[1]

    @property
    def inside(self) -> tuple[Tensor, Tensor]:
        return tuple(x[1:-1] for x in self.held)

    def reserve(self, sequence: int, count: int) -> None:
        needed = -(-(len(self.rows[sequence]) + count) // self.page) - len(self.pages[sequence])
        self.pages[sequence] += [self.free.pop() for _ in range(needed)]

    def write(self, sequence: int, new: Tensor) -> None:
        """new: (count, 2, hk, d); `reserve` came before."""
        for x in new:
            n = len(self.rows[sequence])
            for held, row in zip(self.inside, x, strict=True):
                held[self.pages[sequence][n // self.page], n % self.page] = row
            self.rows[sequence].append(x)

    def leave(self, sequence: int) -> None:
        for held in self.inside:
            held[self.pages[sequence]] = NAN
        self.free += self.pages[sequence]
        self.pages[sequence], self.rows[sequence] = [], []

    def table(self, width: int, device) -> Tensor:
        rows = [listed + [-1] * (width - len(listed)) for listed in self.pages]
        return ints(rows, device)

    def keys(self) -> tuple[Tensor, Tensor, list[int]]:
        """K and V of all sequences, packed, and where each starts."""
        packed = torch.stack([x for rows in self.rows for x in rows])
        starts = [0]
        for rows in self.rows:
            starts.append(starts[-1] + len(rows))
        return packed[:, 0], packed[:, 1], starts

    def assert_intact(self) -> None:
        k, v, starts = self.keys()
        for held, packed in zip(self.held, (k, v), strict=True):
            expected = torch.full_like(held, NAN)
            for b, pages in enumerate(self.pages):
                for n, row in enumerate(packed[starts[b] : starts[b + 1]]):
                    expected[1 + pages[n // self.page], n % self.page] = row
            assert_bitwise("cache", held, expected)


def assert_recomputed(cache: Cache, q: Tensor, cu_q: list[int], out: Tensor) -> None:
    k, v, cu_k = cache.keys()
    ref, std = (
        varlen_ref(f, q, k, v, cu_q, cu_k, causal=True)[0]
        for f in (attention_ref, standard_attention)
    )
    assert_accurate("out", out, ref, std)


def randn(*shape: int, device) -> Tensor:
    return torch.randn(shape).to(BF16).to(device)


def test_growing_steps(device, needs):
    """Each appends a token to every sequence, one of which leaves now and then: its pages, NaN
    again, go to others."""
    steps, every = (1000, 50) if device == "cuda" else (24, 6)
    sequences, width = 5, -(-(steps + 200) // 16)
    cache = Cache.empty(sequences, sequences * width, 16, device)
    for b, length in enumerate((0, 1, 37, 150, 200)):
        cache.reserve(b, length + 1)
        cache.write(b, randn(length, 2, HEADS_KV, DIM, device=device))
    with needs("kvcache", "paged"):
        for step in range(steps):
            for b in range(sequences):
                cache.reserve(b, 1)
            lengths = [len(rows) for rows in cache.rows]
            q = randn(sequences, 1, HEADS, DIM, device=device)
            new = randn(sequences, 2, HEADS_KV, DIM, device=device)
            out = flash_attn_with_kvcache(
                q, *cache.inside, new[:, None, 0], new[:, None, 1], causal=True,
                cache_seqlens=ints(lengths, device), block_table=cache.table(width, device),
            )  # fmt: skip
            for b in range(sequences):
                cache.rows[b].append(new[b])
            if step % every == every - 1:
                assert_recomputed(cache, q[:, 0], [*range(sequences + 1)], out[:, 0])
                cache.assert_intact()
                cache.leave(step // every % sequences)


@pytest.mark.parametrize("page", [16, 24, 100])
def test_chunks_beside_single_tokens(page, device, needs):
    """As continuous batching has them: a prompt in chunks, a draft, single tokens, nothing."""
    steps = 40 if device == "cuda" else 3
    cache = Cache.empty(5, 5 * -(-steps * 130 // page), page, device)
    width = -(-steps * 130 // page) + 2
    order = torch.Generator().manual_seed(page)
    with needs("paged"):
        for _ in range(steps):
            counts = [
                (1, 1, 4, 130, 0)[i] for i in torch.randperm(5, generator=order).tolist()
            ]  # 130: two row blocks, or three
            for b, n in enumerate(counts):
                cache.reserve(b, n)
                cache.write(b, randn(n, 2, HEADS_KV, DIM, device=device))
            cu_q = [0, *torch.tensor(counts).cumsum(0).tolist()]
            q = randn(cu_q[-1], HEADS, DIM, device=device)
            out = flash_attn_varlen_func(
                q, *cache.inside, ints(cu_q, device), ints(cache.keys()[2], device), max(counts),
                cache.page * width, causal=True, block_table=cache.table(width, device),
            )  # fmt: skip
            assert_recomputed(cache, q, cu_q, out)
        cache.assert_intact()


def filled(lengths: list[int], device) -> Cache:
    width = -(-max(lengths) // 16)
    cache = Cache.empty(len(lengths), len(lengths) * width, 16, device)
    for b, length in enumerate(lengths):
        cache.reserve(b, length)
        cache.write(b, randn(length, 2, HEADS_KV, DIM, device=device))
    return cache


def test_a_graph_is_replayed_with_other_lengths(cuda):
    """One capture of a step that appends and turns; sequences of -1 and pages of -1 are padding."""
    cache, most = filled([700, 40, 300, 5], cuda), 1000
    width = -(-most // 16)
    q, k, v = (randn(4, 1, n, DIM, device=cuda) for n in (HEADS, HEADS_KV, HEADS_KV))
    cos, sin = (randn(width * 16, DIM // 2, device=cuda) for _ in range(2))
    used, table = ints([1] * 4, cuda), torch.full((4, width), -1, dtype=torch.int32, device=cuda)

    def step(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=used,
            block_table=table, causal=True,
        )  # fmt: skip

    step(*cache.inside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*cache.inside)
    for lengths in ([699, 39, 299, 4], [-1, 20, -1, 0], [-1] * 4, [1, 39, 100, -1]):
        used.copy_(ints(lengths, cuda))
        table.copy_(cache.table(width, cuda))
        table[torch.tensor([n < 0 for n in lengths])] = -1
        copies = [x.clone() for x in cache.inside]
        expected = step(*copies)
        graph.replay()
        assert_bitwise("out", out, expected)
        for x, copy in zip(cache.inside, copies, strict=True):
            assert_bitwise("cache", x, copy)
        assert not out[[n < 0 for n in lengths]].any()


@pytest.mark.parametrize("window", [(-1, -1), (2047, 0)], ids=["all", "window"])
def test_a_draft_in_a_graph_that_is_replayed_with_other_lengths(cuda, window):
    """Whose tiles are a cluster's of thread blocks each on Hopper, of 16 and of 8."""
    cache = filled([4000], cuda)
    q = torch.zeros(8, HEADS, DIM, dtype=BF16, device=cuda)
    cu_q, cu_k, table = ints([0, 8], cuda), ints([0, 4000], cuda), cache.table(256, cuda)

    def step() -> Tensor:
        return flash_attn_varlen_func(
            q, *cache.inside, cu_q, cu_k, 8, 4096, causal=True, window_size=window,
            block_table=table,
        )  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    k, v, _ = cache.keys()
    for queries, keys in ((8, 4000), (3, 100), (8, 2100), (1, 1), (0, 4000), (8, 0), (8, 4000)):
        q.copy_(randn(*q.shape, device=cuda))
        cu_q[1], cu_k[1] = queries, keys
        graph.replay()
        assert_bitwise("out", out, step())
        assert not out[queries if keys else 0 :].any()
        if queries and keys:
            inputs = q[None, :queries], k[None, :keys], v[None, :keys]
            ref, std = (
                f(*inputs, causal=True, window_size=window)[0]
                for f in (attention_ref, standard_attention)
            )
            assert_accurate("out", out[None, :queries], ref, std)


def test_a_mixed_batch_in_a_graph_and_beside_itself(cuda):
    """Its two launches overlap; what else runs, in this stream or in others, finds both ended."""
    cache = filled([2000, *range(100, 1700, 100)], cuda)
    counts = ints([300] + [1] * 16, cuda)
    q = torch.zeros(int(counts.sum()) + 8, HEADS, DIM, dtype=BF16, device=cuda)
    cu_q = torch.zeros(18, dtype=torch.int32, device=cuda)
    cu_k, table = ints(cache.keys()[2], cuda), cache.table(125, cuda)

    def step() -> Tensor:
        out = flash_attn_varlen_func(
            q, *cache.inside, cu_q, cu_k, 300, 2000, causal=True, block_table=table
        )
        return out.clone()  # what one of them had not written yet would show

    step()
    graphs, outs = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(step())
    streams = [torch.cuda.Stream() for _ in graphs]
    for seed, kept in enumerate((17, 5, 1, 17)):
        torch.manual_seed(seed)
        q.copy_(randn(*q.shape, device=cuda))
        lengths = torch.where(torch.arange(17, device=cuda) < kept, counts, 0)
        cu_q[1:] = lengths.cumsum(0)
        expected = step()
        total = int(cu_q[-1])
        assert_recomputed(cache, q[:total], cu_q.tolist(), expected[:total])
        assert not expected[total:].any()
        torch.cuda.synchronize()
        for _ in range(10):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            assert_bitwise("out", out, expected)


def test_a_cache_of_more_elements_than_an_int_counts(cuda, need_memory):
    """Keys lie in its first pages and in its last ones; a chunk, a draft and single tokens."""
    pages = 2**31 // (16 * HEADS_KV * DIM) + 64
    need_memory(32)  # the two caches take 8
    cache = Cache.empty(4, pages, 16, cuda)
    cache.free = [n for i in range(30) for n in (i, pages - 1 - i)]
    counts = (130, 4, 1, 1)
    for b, length in enumerate((180, 100, 33, 200)):
        cache.reserve(b, length)
        cache.write(b, randn(length, 2, HEADS_KV, DIM, device=cuda))
    cu_q = [0, *torch.tensor(counts).cumsum(0).tolist()]
    q = randn(cu_q[-1], HEADS, DIM, device=cuda)
    out = flash_attn_varlen_func(
        q, *cache.inside, ints(cu_q, cuda), ints(cache.keys()[2], cuda), max(counts), 208,
        causal=True, block_table=cache.table(13, cuda),
    )  # fmt: skip
    assert_recomputed(cache, q, cu_q, out)
    lengths = [len(rows) for rows in cache.rows]
    new = randn(4, 2, HEADS_KV, DIM, device=cuda)
    for b in range(4):
        cache.reserve(b, 1)
    out = flash_attn_with_kvcache(
        q[:4, None], *cache.inside, new[:, None, 0], new[:, None, 1], causal=True,
        cache_seqlens=ints(lengths, cuda), block_table=cache.table(14, cuda),
    )  # fmt: skip
    for b in range(4):
        cache.rows[b].append(new[b])
    assert_recomputed(cache, q[:4], [*range(5)], out[:, 0])
    cache.assert_intact()


def test_many_graphs(cuda):
    """Each has counters of its own for the pieces of its calls (csrc/launch/counter_arena.h)."""
    cache = filled([1900, 700], cuda)
    width = 120
    q = randn(2, 1, HEADS, DIM, device=cuda)
    used, table = ints([1900, 700], cuda), cache.table(width, cuda)

    def step() -> Tensor:
        return flash_attn_with_kvcache(
            q, *cache.inside, cache_seqlens=used, block_table=table, causal=True, num_splits=6
        )

    def capture() -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        return graph, out

    expected = step()
    graphs = [capture() for _ in range(200)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(2):
        torch.cuda.synchronize()
        for n, (graph, _) in enumerate(graphs):
            with torch.cuda.stream(streams[n % len(streams)]):
                graph.replay()
        torch.cuda.synchronize()
        for _, out in graphs:
            assert_bitwise("out", out, expected)
        del graphs[50:150]
        graphs += [capture() for _ in range(100)]
