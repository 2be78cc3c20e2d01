"""Train the demo's GPT on one long sequence, its tokens shared by n processes.

    torchrun --nproc-per-node 2 examples/long_context.py
    torchrun --nproc-per-node 2 examples/long_context.py --method all_to_all --seqlen 65536

The loss of each step is that of one process (without torchrun), up to rounding: every rank embeds,
normalises and multiplies its own tokens, and only attention sees the others'.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `torchrun examples/long_context.py`

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from examples.gpt.data import standard_library_files
from examples.gpt.model import GPT, Attention, GPTConfig
from flash_attn import flash_attn_func
from flash_attn.distributed import (
    Layout,
    all_to_all_attention,
    dense_layout,
    gather_attention,
    position_ids,
    ring_attention,
    shard_sequence,
)
from flash_attn.layers.rotary import apply_rotary_emb

METHODS = {
    "ring": ring_attention,
    "gather": gather_attention,
    "all_to_all": all_to_all_attention,
}


class Shard:
    """This process's tokens of the sequence, and how they attend to all of it."""

    def __init__(
        self, method: str, seqlen: int, rank: int, ranks: int, device: torch.device, group=None
    ):
        self.method, self.rank, self.ranks, self.group = METHODS[method], rank, ranks, group
        split = ranks if method == "all_to_all" else 1
        self.layout: Layout = dense_layout(seqlen, ranks, split=split)
        self.positions = position_ids(self.layout, rank, device)

    def tokens(self, whole: Tensor) -> Tensor:
        """(seqlen,) -> (1, tokens)"""
        return shard_sequence(whole[None], self.layout, self.rank)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.ranks == 1:
            return flash_attn_func(q, k, v, causal=True)
        return self.method(q, k, v, self.layout, self.group, causal=True)


class LongGPT(GPT):
    """The demo's model, with its tokens somewhere in a long sequence."""

    def logits(self, tokens: Tensor, shard: Shard) -> Tensor:
        """(1, tokens) -> (1, tokens, vocab)"""
        x = self.embed(tokens)
        angles = [table[shard.positions] for table in self.rotary(torch.float32)]
        for block in self.blocks:
            x = block(x, lambda y, a=block.attention: self._attend(a, y, angles, shard))
        return self.head(self.norm(x))

    @staticmethod
    def _attend(attention: Attention, x: Tensor, angles: list[Tensor], shard: Shard) -> Tensor:
        q, k, v = attention.split(attention.project(x))  # (1, tokens, heads, head_dim)
        q, k = (apply_rotary_emb(y, *angles) for y in (q, k))
        return attention.out(shard.attend(q, k, v).flatten(-2))


def text(seqlen: int) -> Tensor:
    """(seqlen + 1,) int64: the standard library, from its beginning."""
    joined = b"".join(standard_library_files())[: seqlen + 1]
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def train(
    config: GPTConfig, shard: Shard, steps: int, lr: float, device: torch.device, dtype: torch.dtype
) -> list[float]:
    """The loss of each step, the same on every rank."""
    torch.manual_seed(0)  # the same weights everywhere
    model = LongGPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    whole = text(config.max_seqlen).to(device)
    tokens, targets = shard.tokens(whole[:-1]), shard.tokens(whole[1:])
    losses = []
    for _ in range(steps):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model.logits(tokens, shard)
        # A sum over this rank's tokens by the number of all: sums over ranks are the whole's.
        loss = F.cross_entropy(logits[0].float(), targets[0], reduction="sum") / len(whole[1:])
        loss.backward()
        everything = [loss.detach(), *(p.grad for p in model.parameters())]
        if shard.ranks > 1:
            for x in everything:
                dist.all_reduce(x, group=shard.group)
        losses.append(everything[0].item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=METHODS, default="ring")
    parser.add_argument("--seqlen", type=int, default=8192, help="bytes (default 8192)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    rank, ranks = (int(os.environ.get(name, default)) for name, default in
                   (("RANK", 0), ("WORLD_SIZE", 1)))  # fmt: skip
    device, dtype = torch.device("cpu"), torch.float32
    if torch.cuda.is_available():
        device, dtype = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), torch.bfloat16
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shard = Shard(args.method, args.seqlen, rank, ranks, device)
    losses = train(GPTConfig(max_seqlen=args.seqlen), shard, args.steps, args.lr, device, dtype)
    if rank == 0:
        print(f"{args.seqlen} bytes over {ranks} processes, {len(shard.positions)} on this one")
        print("loss", " ".join(f"{loss:.4f}" for loss in losses))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
