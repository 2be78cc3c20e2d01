"""A client as it is: ring-flash-attn, which calls the private forward and backward by name."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if importlib.util.find_spec("ring_flash_attn") is None:
    pytest.skip("ring-flash-attn is not installed", allow_module_level=True)
RANKS = 2


def client() -> types.ModuleType:
    """The package without its adapters, which need a transformers of its time."""
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = adapters
    import ring_flash_attn

    return ring_flash_attn


def run(rank: int, store: str, name: str, result) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    import flash_attn

    gen = torch.Generator().manual_seed(0)
    # Half precision: the client keeps float32 gradients in the buffers that it overwrites.
    qkv = torch.randn(2, 64 * RANKS, 3, 4, 16, generator=gen).bfloat16()
    dout = torch.randn(2, 64 * RANKS, 4, 16, generator=gen).bfloat16()
    whole = qkv.clone().requires_grad_()
    out = flash_attn.flash_attn_qkvpacked_func(whole, causal=True)
    out.backward(dout)

    def mine(x):
        if name.startswith("zigzag"):
            chunks = x.chunk(2 * RANKS, dim=1)
            return torch.cat([chunks[rank], chunks[2 * RANKS - 1 - rank]], dim=1)
        return x.chunk(RANKS, dim=1)[rank]

    local = mine(qkv).detach().clone().requires_grad_()
    local_out = getattr(client(), name)(local, causal=True)
    local_out.backward(mine(dout))
    errors = [
        (ours.detach() - mine(expected.detach())).float().abs().max().item()
        for ours, expected in ((local_out, out), (local.grad, whole.grad))
    ]
    result.put((rank, errors))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", ["ring_flash_attn_qkvpacked_func", "zigzag_ring_flash_attn_qkvpacked_func"]
)
def test_ring_attention_of_two_processes(name, tmp_path):
    context = mp.get_context("spawn")
    result = context.SimpleQueue()
    mp.spawn(run, args=(str(tmp_path / "store"), name, result), nprocs=RANKS)
    for _ in range(RANKS):
        rank, errors = result.get()
        assert max(errors) < 3e-2, (rank, errors)
