"""Attention over several GPUs beside one, and beside other implementations of it.

    torchrun --nproc-per-node 2 -m benchmarks.ring [--seqlens 32768,131072] [--out ring.json]

Efficiency is T(1) / (n T(n)) of the same sequence, T(1) that of our own call on one GPU. A figure
is the median of samples of a few calls each, the slowest rank's. Memory is the peak on top of the
inputs, of the rank with most.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func
from flash_attn.distributed import (
    Layout,
    all_to_all_attention,
    dense_layout,
    gather_attention,
    ring_attention,
    shard_sequence,
)

HEADS, HEADS_K, HEAD_DIM = 32, 8, 128
ONE_GPU = "one GPU"


@dataclass
class Row:
    seqlen: int
    what: str  # "fwd" or "fwd+bwd"
    contender: str
    ranks: int
    milliseconds: float
    efficiency: float
    megabytes: float


@dataclass
class Contender:
    layout: Layout
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]  # of a rank's (1, tokens, heads, head_dim)
    around: Callable = contextlib.nullcontext  # all of its calls


def ours(seqlen: int, ranks: int) -> dict[str, Contender]:
    def contender(attend: Callable, layout: Layout) -> Contender:
        return Contender(layout, lambda q, k, v: attend(q, k, v, layout, causal=True))

    return {
        "ring, zigzag": contender(ring_attention, dense_layout(seqlen, ranks)),
        "ring, contiguous": contender(ring_attention, dense_layout(seqlen, ranks, "contiguous")),
        "all-to-all": contender(
            all_to_all_attention, dense_layout(seqlen, ranks, "contiguous", split=ranks)
        ),
        "gather, zigzag": contender(gather_attention, dense_layout(seqlen, ranks)),
    }


def others(seqlen: int, ranks: int) -> dict[str, Contender]:
    """Other packages' attention over a ring, of the packages that are installed."""
    found = {}
    with contextlib.suppress(ImportError):
        peer = _ring_flash_attn()

        def zigzag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return peer.zigzag_ring_flash_attn_func(q, k, v, causal=True)

        found["ring-flash-attn, zigzag"] = Contender(dense_layout(seqlen, ranks), zigzag)
    return found | {
        "torch context_parallel": _torch_context_parallel(seqlen, ranks, 1),
        "torch, KV heads repeated": _torch_context_parallel(seqlen, ranks, HEADS // HEADS_K),
    }


def _ring_flash_attn() -> types.ModuleType:
    """The package without its adapters, which need a transformers of its time."""
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = adapters
    return importlib.import_module("ring_flash_attn")


def _torch_context_parallel(seqlen: int, ranks: int, repeats: int) -> Contender:
    """Its load balancing is the same zigzag; inside the context SDPA takes a rank's shards."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (ranks,))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=repeats == 1)
        return out.transpose(1, 2)

    @contextlib.contextmanager
    def around():
        positions = torch.arange(seqlen, device="cuda")[None]  # it insists on a tensor to cut
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(
                mesh,
                buffers=[positions],
                buffer_seq_dims=[1],
                no_restore_buffers={positions},
            ),
        ):
            yield

    return Contender(dense_layout(seqlen, ranks), attend, around)


def step(contender: Contender, tensors: list[Tensor], dout: Tensor, what: str) -> Callable:
    def run() -> None:
        if what == "fwd":
            contender.attend(*(x.detach() for x in tensors))
        else:
            torch.autograd.grad(contender.attend(*tensors), tensors, dout)

    return run


class Stopwatch:
    """Times what all ranks do: each sample is the slowest rank's."""

    def __init__(self, samples: int, alone: bool = False):
        self.samples, self.alone = samples, alone

    def _slowest(self, value: float) -> float:
        if self.alone:
            return value
        most = torch.tensor(value, device="cuda")
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.item()

    def milliseconds(self, fn: Callable, calls: int) -> float:
        fn()
        taken = []
        for _ in range(self.samples):
            if not self.alone:
                dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                fn()
            end.record()
            end.synchronize()
            taken.append(self._slowest(begin.elapsed_time(end) / calls))
        return statistics.median(taken)

    def megabytes(self, fn: Callable) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        return self._slowest((torch.cuda.max_memory_allocated() - before) / 2**20)


def whole(seqlen: int) -> list[Tensor]:
    """q, k, v and dout, the same on every rank."""
    gen = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, seqlen, h, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=gen)
        for h in (HEADS, HEADS_K, HEADS_K, HEADS)
    ]


def _calls(seqlen: int, what: str) -> int:
    """A sample's: some tenths of a second, so that the first one's launches do not count."""
    return max(2, (2**34 if what == "fwd" else 2**33) // seqlen**2)


def measure(seqlen: int, what: str, samples: int, wanted: str) -> list[Row]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    calls = _calls(seqlen, what)
    *tensors, dout = whole(seqlen)
    tensors = [x.requires_grad_() for x in tensors]
    single = Contender(dense_layout(seqlen, 1), lambda *x: flash_attn_func(*x, causal=True))
    fn = step(single, tensors, dout, what)
    alone = Stopwatch(samples, alone=True)
    if rank:  # the other GPUs rest: power and clocks are those of one
        one, memory = 0.0, 0.0
    else:
        one, memory = alone.milliseconds(fn, calls), alone.megabytes(fn)
    told = torch.tensor([one, memory], device="cuda")
    dist.broadcast(told, 0)
    one, memory = told.tolist()
    rows = [Row(seqlen, what, ONE_GPU, 1, one, 1.0, memory)]
    del fn
    watch = Stopwatch(samples)
    for name, contender in {**ours(seqlen, ranks), **others(seqlen, ranks)}.items():
        if wanted not in name:
            continue
        mine = [shard_sequence(x.detach(), contender.layout, rank) for x in (*tensors, dout)]
        fn = step(contender, [x.requires_grad_() for x in mine[:3]], mine[3], what)
        try:
            with contender.around():
                many, memory = watch.milliseconds(fn, calls), watch.megabytes(fn)
        except Exception as error:  # a contender that does not do this point, on any rank
            if rank == 0:
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            continue
        rows.append(Row(seqlen, what, name, ranks, many, one / (ranks * many), memory))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", default="32768,131072")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Transfers have few blocks: with priority they do not wait for the end of a kernel that fills
    # the GPU.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group("nccl", pg_options=options)
    rows = []
    for seqlen in map(int, args.seqlens.split(",")):
        for what in ("fwd", "fwd+bwd"):
            for row in measure(seqlen, what, args.samples, args.only):
                rows.append(row)
                if dist.get_rank() == 0:
                    print(
                        f"{row.seqlen:>8} {row.what:<8} {row.contender:<26} "
                        f"{row.milliseconds:9.3f} ms  {row.efficiency:6.3f} "
                        f"{row.megabytes:9.0f} MiB",
                        flush=True,
                    )
            torch.cuda.empty_cache()
    if args.out and dist.get_rank() == 0:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.out.write_text(json.dumps(machine | {"rows": [asdict(row) for row in rows]}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
