"""Models with attention under DDP and FSDP2: gradients are those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from flash_attn.modules.mha import MHA
from tests.distributed.processes import group

RANKS, BATCH, DIM = 2, 4, 32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = dict(num_heads=4, num_heads_kv=2, causal=True, rotary_emb_dim=8)
        self.layers = nn.ModuleList(
            MHA(DIM, **sizes, use_flash_attn=True, layer_idx=i) for i in range(2)
        )

    def forward(self, x, checkpointed: bool = False):
        for layer in self.layers:
            run = layer
            if checkpointed:
                x = x + checkpoint(run, x, use_reentrant=False)
            else:
                x = x + run(x)
        return x


def example() -> tuple[Model, torch.Tensor, dict[str, torch.Tensor]]:
    """The model, its input, and the gradients of the mean over the whole batch."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(BATCH, 12, DIM)
    model(x).square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return model, x, gradients


def mine(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(RANKS)[rank]


def ddp(rank: int) -> None:
    model, x, gradients = example()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group(RANKS))
    wrapped(mine(x, rank)).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def test_ddp(processes):
    processes.run(ddp, ranks=RANKS)


def fsdp(rank: int, dtype: torch.dtype, checkpointed: bool) -> None:
    model, x, gradients = example()
    mesh = DeviceMesh.from_group(group(RANKS), "cpu")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model(mine(x, rank), checkpointed).float().square().mean().backward()
    bound = {} if dtype == torch.float32 else {"rtol": 2**-5, "atol": 2**-5}
    for name, parameter in model.named_parameters():
        assert parameter.grad.to_local().numel() < gradients[name].numel()
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], **bound)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp2(processes, dtype, checkpointed):
    processes.run(fsdp, dtype, checkpointed, ranks=RANKS)
