"""A KV cache in 8 bits: its descales from some texts, and what it costs in loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.gpt.model import GPT, LayerCache
from flash_attn.utils.kv_quantization import KVScales


@torch.no_grad()
def calibrate(model: GPT, rows: Tensor, dtype: torch.dtype) -> list[KVScales]:
    """The scales of each layer, from what an ordinary cache in ``dtype`` holds after these texts.

    rows: (batch, seqlen) tokens, like those that will be generated but not those of a test.
    """
    cache = model.new_cache(len(rows), dtype)
    model.decode(rows, cache, torch.zeros(len(rows), dtype=torch.int32, device=rows.device))
    # Other texts have somewhat larger keys, which a margin leaves room for. It costs next to
    # nothing, because codes are floating-point numbers.
    scales = [KVScales(model.config.heads_kv, margin=1.5, device=rows.device) for _ in cache]
    written = slice(rows.shape[1])  # the rest of the cache may hold anything
    for layer, kv in zip(scales, cache, strict=True):
        layer.observe(kv.k[:, written], kv.v[:, written])
    return scales


@torch.no_grad()
def loss_through_cache(model: GPT, rows: Tensor, cache: list[LayerCache], prompt: int) -> float:
    """Nats per byte where every key and value is read from the cache, which is empty at first.

    It reads as generation does: ``prompt`` tokens in one call, then one token in each. But the next
    token is the text's, whatever the model would choose, so that two caches read the same texts.

    rows: (batch, seqlen + 1) tokens; the first seqlen are read, the last seqlen are to be guessed.
    """
    read, targets = rows[:, :-1], rows[:, 1:]
    used = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
    logits = []
    for new in read.split([prompt] + [1] * (read.shape[1] - prompt), dim=1):
        logits.append(model.decode(new, cache, used))
        used += new.shape[1]
    return F.cross_entropy(torch.cat(logits, dim=1).flatten(0, 1).float(), targets.flatten()).item()
