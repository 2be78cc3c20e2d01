"""Inside what training programs do: checkpointing, compilation, FSDP2, an optimizer's steps."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flash_attn import distributed, flash_attn_func
from flash_attn.distributed import (
    dense_layout,
    gather_attention,
    position_ids,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from flash_attn.layers.rotary import apply_rotary_emb
from tests.distributed.processes import error_of, group

RANKS, SEQLEN, DIM, HEADS = 2, 48, 32, 4


class Layer(nn.Module):
    """Attention with rotary embeddings; of the whole sequence if there is no layout."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, positions, layout=None, ranks=None, attend=ring_attention):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        angles = positions[:, None] / 100 ** torch.linspace(0, 1, q.shape[-1] // 2)
        q, k = (apply_rotary_emb(y, angles.cos(), angles.sin()) for y in (q, k))
        if layout is None:
            out = flash_attn_func(q, k, v, causal=True)
        else:
            out = attend(q, k, v, layout, ranks, causal=True)
        return self.out(out.flatten(2))


def whole():
    torch.manual_seed(0)
    model, x = Layer().double(), torch.randn(2, SEQLEN, DIM, dtype=torch.float64)
    loss = model(x, torch.arange(SEQLEN)).square().mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return model, x, loss.detach(), gradients


def compare(model, loss, expected, gradients, ranks) -> None:
    """Each rank's loss is its tokens' share, and so are its gradients."""
    total = loss.detach().clone()
    dist.all_reduce(total, group=ranks)
    torch.testing.assert_close(total, expected)
    for name, parameter in model.named_parameters():
        summed = parameter.grad.clone()
        dist.all_reduce(summed, group=ranks)
        torch.testing.assert_close(summed, gradients[name])


def train(rank: int, how: str) -> None:
    model, x, expected, gradients = whole()
    layout, ranks = dense_layout(SEQLEN, RANKS), group(RANKS)
    mine, positions = shard_sequence(x, layout, rank), position_ids(layout, rank)
    attend = gather_attention if how.startswith("gather") else ring_attention
    run = model
    if how.endswith("compiled"):
        run = torch.compile(model, backend="aot_eager")
    if how.endswith("checkpointed"):
        out = checkpoint(run, mine, positions, layout, ranks, attend, use_reentrant=False)
    else:
        out = run(mine, positions, layout, ranks, attend)
    loss = out.square().sum() / x.numel()
    loss.backward()
    compare(model, loss, expected, gradients, ranks)
    together = unshard_sequence(out.detach(), layout, ranks)
    torch.testing.assert_close(together, model(x, torch.arange(SEQLEN)).detach())


@pytest.mark.parametrize(
    "how", ["plain", "checkpointed", "gather-checkpointed", "compiled", "gather-compiled"]
)
def test_training(processes, how):
    processes.run(train, how, ranks=RANKS)


def graphs(rank: int, attend) -> int:
    """How many a compiled layer is cut into."""
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    torch._dynamo.reset()
    layout, ranks = dense_layout(SEQLEN, RANKS), group(RANKS)
    x, positions = torch.randn(1, SEQLEN // RANKS, DIM), position_ids(layout, rank)
    with torch.no_grad():
        torch.compile(Layer(), backend=backend)(x, positions, layout, ranks, attend)
    return len(compiled)


@pytest.mark.parametrize("attend", [ring_attention, gather_attention])
def test_the_graph_breaks_at_communication_alone(processes, attend):
    assert processes.run(graphs, attend, ranks=RANKS) == [2, 2]


def selective(rank: int) -> None:
    """A checkpoint that keeps the results of matrix products alone."""

    def policy(ctx, op, *args, **kwargs):
        save = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    model, x, expected, gradients = whole()
    layout, ranks = dense_layout(SEQLEN, RANKS), group(RANKS)
    mine, positions = shard_sequence(x, layout, rank), position_ids(layout, rank)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(
        model, mine, positions, layout, ranks, use_reentrant=False, context_fn=contexts
    )
    loss = out.square().sum() / x.numel()
    loss.backward()
    compare(model, loss, expected, gradients, ranks)


def test_a_selective_checkpoint(processes):
    processes.run(selective, ranks=RANKS)


def fsdp(rank: int) -> None:
    """Weights are sharded over the ranks that share the sequence, and gradients summed by FSDP."""
    from torch.distributed.fsdp import fully_shard

    model, x, expected, gradients = whole()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = dense_layout(SEQLEN, mesh.size())
    fully_shard(model, mesh=mesh)
    mine, positions = shard_sequence(x, layout, rank), position_ids(layout, rank)
    out = model(mine, positions, layout, mesh.get_group())
    # FSDP averages over its ranks.
    loss = out.square().sum() / x.numel() * mesh.size()
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name])
    del expected


def test_fsdp(processes):
    processes.run(fsdp)


def second_derivative(rank: int, name: str) -> str:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    layout = dense_layout(8, 2, split=2 if name == "all_to_all" else 1)
    out = getattr(distributed, f"{name}_attention")(q, q, q, layout, group(2))
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    return error_of(RuntimeError, dq.sum().backward)


@pytest.mark.parametrize("name", ["ring", "gather", "all_to_all"])
def test_there_is_no_second_derivative(processes, name):
    for said in processes.run(second_derivative, name, ranks=2):
        assert "no second derivative" in said
