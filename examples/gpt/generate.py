"""Text from the model: with a KV cache, and (to check and to compare) by recomputing everything."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.gpt.model import GPT, Packed
from flash_attn.utils.kv_quantization import KVScales


@dataclass
class Generated:
    text: bytes
    logits: Tensor  # (new, vocab) fp32
    tokens_per_second: float


def printable(text: bytes) -> str:
    """Without what would move a terminal's cursor: an untrained model writes any byte."""
    kept = (
        c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text.decode(errors="replace")
    )
    return "".join(kept)


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """(vocab,) -> () token; the likeliest one at temperature 0."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: bytes,
    new_tokens: int,
    *,
    dtype: torch.dtype,
    temperature: float = 0.0,
    use_cache: bool = True,
    scales: list[KVScales] | None = None,
    seed: int = 0,
) -> Generated:
    """Continue ``prompt``. The clock starts after the prompt has been read.

    With ``scales``, those of each layer, the cache has 8 bits; else it is of ``dtype``.
    """
    device = model.cos.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor(list(prompt), device=device)
    next_logits = _Cached(model, dtype, scales) if use_cache else _Recomputed(model)

    logits = next_logits(tokens)
    new, kept = [], []
    start = time.perf_counter()
    for step in range(new_tokens):
        kept.append(logits)
        new.append(choose(logits, temperature, generator))
        if step + 1 < new_tokens:
            logits = next_logits(new[-1][None])
    text = bytes(torch.stack(new).tolist())
    seconds = time.perf_counter() - start
    return Generated(text, torch.stack(kept), (new_tokens - 1) / seconds)


class _Cached:
    """Logits after the tokens seen so far; each call costs one attention row per new token."""

    def __init__(self, model: GPT, dtype: torch.dtype, scales: list[KVScales] | None):
        self.model = model
        self.cache = model.new_cache(1, dtype, scales)
        self.used = torch.zeros(1, dtype=torch.int32, device=model.cos.device)

    def __call__(self, new: Tensor) -> Tensor:
        logits = self.model.decode(new[None], self.cache, self.used)
        self.used += len(new)
        return logits[0, -1].float()


class _Recomputed:
    """The same logits by running the whole text again."""

    def __init__(self, model: GPT):
        self.model = model
        self.tokens = torch.zeros(0, dtype=torch.long, device=model.cos.device)

    def __call__(self, new: Tensor) -> Tensor:
        self.tokens = torch.cat((self.tokens, new))
        total = len(self.tokens)
        cu_seqlens = torch.tensor([0, total], dtype=torch.int32, device=self.tokens.device)
        return self.model(Packed(self.tokens, self.tokens, cu_seqlens, total))[-1].float()
