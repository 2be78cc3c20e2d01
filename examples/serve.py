"""Serve the demo's GPT by continuous batching over a paged KV cache.

    python examples/serve.py

One attention call serves prompts in chunks and single tokens together. A request is admitted
while pages are free; each step runs up to --budget tokens, first one for each request that
generates, then chunks of prompts; when no page is left for a token, the request that came last
gives its pages back, and is computed again later. The texts are those that the model writes one
by one. The weights are random: what counts is the loop.

It needs tqdm: `pip install ".[demo]"`, which `make demo` does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the package `examples`

import torch
from torch import Tensor
from tqdm import tqdm

from examples.gpt.data import Corpus
from examples.gpt.generate import generate
from examples.gpt.model import GPT, GPTConfig
from flash_attn import flash_attn_varlen_func


@dataclass
class Request:
    prompt: bytes
    new_tokens: int
    tokens: list[int] = field(default_factory=list)  # prompt, then what was generated
    cached: int = 0  # tokens whose keys lie in `pages`
    pages: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def text(self) -> bytes:
        return bytes(self.tokens[len(self.prompt) :])

    @property
    def done(self) -> bool:
        return len(self.tokens) - len(self.prompt) >= self.new_tokens


class Step(NamedTuple):
    """Where the tokens of one pass lie, (total,) each, and what attention is told of its batch."""

    positions: Tensor
    pages: Tensor
    rows: Tensor  # of their pages
    batch: dict[str, Tensor | int]


class Engine:
    """Serves requests; ``step`` until it says that none is left."""

    def __init__(self, model: GPT, pages: int, page_size: int, dtype: torch.dtype, budget: int):
        c = model.config
        self.model, self.page_size, self.dtype, self.budget = model, page_size, dtype, budget
        self.device = model.cos.device
        shape = (c.layers, 2, pages, page_size, c.heads_kv, c.head_dim)
        self.cache = torch.zeros(shape, dtype=dtype, device=self.device)
        self.free = list(range(pages))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of their admission
        self.evictions = 0

    def add(self, request: Request) -> None:
        needed = -(-(len(request.prompt) + request.new_tokens) // self.page_size)
        if needed > self.cache.shape[2]:
            raise ValueError(f"a request of {needed} pages; the cache has {self.cache.shape[2]}")
        self.waiting.append(request)

    def step(self) -> bool:
        """One pass of the model; False when nothing was left to do."""
        plan = self._plan()
        if not plan:
            return False
        logits = self._forward(plan)
        for (request, count), row in zip(plan, logits, strict=True):
            request.cached += count
            if request.cached == len(request.tokens):
                request.tokens.append(int(row))
            if request.done:
                self.running.remove(request)
                self._release(request)
        return True

    def _plan(self) -> list[tuple[Request, int]]:
        """Which requests go on by how many tokens; all of these have pages."""
        plan: list[tuple[Request, int]] = []
        left = self.budget
        # Requests that generate come first: sorting keeps the order of admission among them.
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.cached > 1):
            count = min(len(request.tokens) - request.cached, left)
            if count > 0 and request in self.running and self._reserve(request, count, plan):
                plan.append((request, count))
                left -= count
        while self.waiting and left > 0:
            request = self.waiting[0]
            count = min(len(request.tokens), left)
            # With a page more for each of those that generate, or it would soon be evicted again.
            wanted = -(-len(request.tokens) // self.page_size) + len(self.running)
            if self.running and len(self.free) < wanted:
                break
            self.running.append(self.waiting.popleft())
            self._reserve(request, count, plan)
            plan.append((request, count))
            left -= count
        return plan

    def _reserve(self, request: Request, count: int, plan: list[tuple[Request, int]]) -> bool:
        """Pages for `count` tokens more, if need be those of requests that came later."""
        needed = -(-(request.cached + count) // self.page_size) - len(request.pages)
        planned = [r for r, _ in plan]
        while len(self.free) < needed:
            last = self.running[-1]
            if last in planned:
                return False
            self.running.pop()
            self._release(last)
            self.waiting.appendleft(last)
            self.evictions += 1
            if last is request:
                return False
        for _ in range(needed):
            request.pages.append(self.free.pop())
        return True

    def _release(self, request: Request) -> None:
        self.free += request.pages
        request.pages, request.cached = [], 0

    @torch.inference_mode()
    def _forward(self, plan: list[tuple[Request, int]]) -> Tensor:
        """The likeliest token after the last one of each request."""
        tokens = self._tensor([t for r, n in plan for t in r.tokens[r.cached : r.cached + n]])
        step = self._step(plan)
        cos, sin = (x[step.positions, None] for x in self.model.rotary(self.dtype))
        x = self.model.embed(tokens)
        for layer, block in enumerate(self.model.blocks):

            def attend(y, attention=block.attention, layer=layer):
                q, k, v = attention.split(attention.project(y).to(self.dtype))
                out = self.attend(layer, turn(q, cos, sin), turn(k, cos, sin), v, step)
                return attention.out(out.flatten(-2).to(y.dtype))

            x = block(x, attend)
        last = step.batch["cu_seqlens_q"][1:].long() - 1
        return self.model.head(self.model.norm(x[last])).argmax(-1)

    def _step(self, plan: list[tuple[Request, int]]) -> Step:
        counts = [n for _, n in plan]
        keys = [r.cached + n for r, n in plan]
        at = [(r, i) for r, n in plan for i in range(r.cached, r.cached + n)]
        positions = self._tensor([i for _, i in at])
        pages = self._tensor([r.pages[i // self.page_size] for r, i in at])
        longest = max(len(r.pages) for r, _ in plan)
        table = [r.pages + [-1] * (longest - len(r.pages)) for r, _ in plan]
        batch = {
            "cu_seqlens_q": self._tensor([0, *accumulate(counts)], torch.int32),
            "cu_seqlens_k": self._tensor([0, *accumulate(keys)], torch.int32),
            "max_seqlen_q": max(counts),
            "max_seqlen_k": max(keys),
            "block_table": self._tensor(table, torch.int32),
        }
        return Step(positions, pages, positions % self.page_size, batch)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Attention of one layer, q (total, heads, head_dim), whose new keys go into the cache."""
        k_pages, v_pages = self.cache[layer]
        k_pages[step.pages, step.rows], v_pages[step.pages, step.rows] = k, v
        return flash_attn_varlen_func(q, k_pages, v_pages, **step.batch, causal=True)

    def _tensor(self, values: list, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, by halves: x (total, heads, head_dim), cos and sin (total, 1, half)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def serve(engine: Engine, requests: list[Request]) -> float:
    """Runs all requests; returns the seconds it took."""
    for request in requests:
        engine.add(request)
    start = time.perf_counter()
    with tqdm(total=sum(r.new_tokens for r in requests), unit="token") as progress:
        while engine.step():
            postfix = {"running": len(engine.running), "evicted": engine.evictions}
            progress.set_postfix(postfix, refresh=False)
            progress.update(sum(len(r.text) for r in requests) - progress.n)
    return time.perf_counter() - start


def make_requests(count: int, new_tokens: int, longest: int) -> list[Request]:
    """Beginnings of the corpus' sequences, of 8 bytes to `longest`."""
    batch = Corpus(tokens_per_batch=count * 128, max_seqlen=128).held_out_batches(1)[0]
    lengths = torch.randint(8, longest + 1, (count,), generator=torch.Generator().manual_seed(0))
    starts = batch.tokens.unfold(0, longest, 1)[:: len(batch.tokens) // count]
    return [
        Request(bytes(start[:n].tolist()), new_tokens)
        for start, n in zip(starts, lengths.tolist(), strict=False)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = torch.cuda.is_available()

    def number(name: str, meaning: str, gpu: int, cpu: int) -> None:
        default = gpu if on_gpu else cpu
        parser.add_argument(name, type=int, default=default, help=f"{meaning} (default {default})")

    number("--requests", "how many there are, all at once", 512, 12)
    number("--new-tokens", "generated for each request", 256, 24)
    number("--pages", "of the cache; fewer evict more requests", 4096, 24)
    number("--page-size", "tokens a page", 16, 16)
    number("--budget", "tokens a step, of prompts and generated ones together", 1024, 64)
    device = "cuda" if on_gpu else "cpu"
    parser.add_argument("--device", default=device, help=f"where it runs (default {device})")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = GPT(GPTConfig()).to(device)
    requests = make_requests(args.requests, args.new_tokens, longest=128)
    engine = Engine(model, args.pages, args.page_size, dtype, args.budget)
    seconds = serve(engine, requests)
    made = sum(len(r.text) for r in requests)
    print(f"{len(requests)} requests, {made} tokens: {made / seconds:.0f} tokens/s")
    if dtype == torch.float32:
        alone = [generate(model, r.prompt, r.new_tokens, dtype=dtype) for r in requests[:3]]
        assert [x.text for x in alone] == [r.text for r in requests[:3]]
        print(f"the same as one by one, at {alone[0].tokens_per_second:.0f} tokens/s")


if __name__ == "__main__":
    main()
