"""Models that call torch's own attention, under FSDP2 and on one process: logits and gradients.

On the CPU torch's function never takes its flash back end: the operator below it is called.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from flash_attn import torch_attention
from tests.distributed.processes import group

RANKS, BATCH, SEQLEN, DIM, HEADS, HEADS_K, VOCABULARY = 2, 4, 12, 32, 4, 2, 50
SDPA = torch.ops.aten._scaled_dot_product_flash_attention


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM * HEADS_K // HEADS)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, HEADS_K, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(SDPA(q, k, v, 0.0, True)[0].transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor, checkpointed: bool = False) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return self.head(x)


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def sharded(rank: int, how: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(VOCABULARY, (BATCH, SEQLEN))
    served = torch_attention.Override("CPU")
    try:
        expected = model(ids)
        loss(expected, ids).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()

        mesh = DeviceMesh.from_group(group(RANKS), "cpu")
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in model.layers:
            if how == "compiled":
                torch._dynamo.reset()
                layer.compile(fullgraph=True, backend="aot_eager")
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        mine = ids.chunk(RANKS)[rank]
        logits = model(mine, how == "checkpointed")
        loss(logits, mine).backward()
    finally:
        served.remove()

    bound = {} if dtype == torch.float32 else {"rtol": 2**-5, "atol": 2**-5}
    torch.testing.assert_close(logits.float(), expected.chunk(RANKS)[rank], **bound)
    for name, parameter in model.named_parameters():
        assert parameter.grad.to_local().numel() < gradients[name].numel()
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], **bound)


@pytest.mark.parametrize("how", ["eager", "checkpointed", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp2(processes, dtype, how):
    processes.run(sharded, how, dtype, ranks=RANKS)
