"""Layers shared out among two processes against the same layers whole, results and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn.modules.embedding import (
    GPT2Embeddings,
    ParallelGPT2Embeddings,
    VocabParallelEmbedding,
)
from flash_attn.modules.mha import MHA, ParallelMHA
from flash_attn.modules.mlp import (
    FusedMLP,
    GatedMlp,
    Mlp,
    ParallelFusedMLP,
    ParallelGatedMlp,
    ParallelMLP,
)
from flash_attn.ops.fused_dense import ColumnParallelLinear, RowParallelLinear
from flash_attn.utils import distributed
from flash_attn.utils.generation import InferenceParams

WORLD, DIM, ROWS = 2, 24, 8
F64 = {"dtype": torch.float64}


def own(x: Tensor, rank: int, dim: int = 0) -> Tensor:
    return x.chunk(WORLD, dim)[rank]


def make(whole: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in whole.parameters():
        nn.init.normal_(p, std=0.3)
    return whole


def run_both(whole, shared, x: Tensor, rank: int, by_rows: bool, **kwargs) -> None:
    """Same results, input gradients, and sharded parameter gradients as ``same`` pairs them."""
    x = x.clone().requires_grad_()
    expected = whole(x)
    dout = torch.linspace(-1, 1, expected.numel(), **F64).view_as(expected)
    expected.backward(dout)
    part = (own(x.detach(), rank) if by_rows else x.detach()).clone().requires_grad_()
    out = shared(part, **kwargs)
    out.backward((own(dout, rank) if by_rows else dout).reshape(out.shape))
    wanted = own(expected, rank) if by_rows else expected
    torch.testing.assert_close(out, wanted.reshape(out.shape))
    torch.testing.assert_close(part.grad, own(x.grad, rank) if by_rows else x.grad)


def copy_shard(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(bias)


def copy_mlp(shared, whole, rank: int, gated: bool = False) -> None:
    parts = [own(t, rank) for t in (whole.fc1.weight, whole.fc1.bias)]
    if gated:  # this rank's y, then its gate
        parts = [
            torch.cat([own(half, rank) for half in t.chunk(2)])
            for t in (whole.fc1.weight, whole.fc1.bias)
        ]
    copy_shard(shared.fc1, *parts)
    copy_shard(shared.fc2, own(whole.fc2.weight, rank, dim=1), whole.fc2.bias)
    assert (shared.fc2.bias is None) == (rank != 0)


def check_mlps(rank: int, group) -> None:
    x = torch.randn(ROWS, 3, DIM, **F64)
    for by_rows in (True, False):
        options = {"process_group": group, "sequence_parallel": by_rows, **F64}
        whole, shared = make(Mlp(DIM, **F64)), ParallelMLP(DIM, **options)
        copy_mlp(shared, whole, rank)
        run_both(whole, shared, x, rank, by_rows)
        torch.testing.assert_close(shared.fc1.weight.grad, own(whole.fc1.weight.grad, rank))
        torch.testing.assert_close(shared.fc2.weight.grad, own(whole.fc2.weight.grad, rank, dim=1))

        whole = make(GatedMlp(DIM, 20, activation=F.silu, multiple_of=4, **F64))
        shared = ParallelGatedMlp(DIM, group, 20, activation=F.silu, multiple_of=4,
                                  sequence_parallel=by_rows, **F64)  # fmt: skip
        copy_mlp(shared, whole, rank, gated=True)
        run_both(whole, shared, x, rank, by_rows)

        for level in (0, 1):
            whole = make(FusedMLP(DIM, **F64))
            shared = ParallelFusedMLP(DIM, checkpoint_lvl=level, **options)
            copy_mlp(shared, whole, rank)
            run_both(whole, shared, x, rank, by_rows)
    for kind in (ParallelMLP, ParallelFusedMLP):
        with pytest.raises(ValueError, match="process_group: got None"):
            kind(DIM)


def check_fused_mlp_of_gathered_rows(rank: int, group) -> None:
    """A layer that is not sharded itself: each rank makes a part of the sum."""
    mlp = make(FusedMLP(DIM, bias2=False, **F64))
    x = torch.randn(ROWS, DIM, **F64)
    out = mlp(own(x, rank), process_group=group)
    torch.testing.assert_close(out, own(WORLD * mlp(x), rank))


def check_linears(rank: int, group) -> None:
    x = torch.randn(ROWS, DIM, **F64)
    for features in (5, 4):  # the first rank takes the odd one
        layer = ColumnParallelLinear(DIM, features * 3, group, multiple_of=3, **F64)
        assert layer.out_features == 3 * (features // 2 + (rank == 0 and features % 2))
    layer = RowParallelLinear(DIM, 7, group, sequence_parallel=False, **F64)
    whole = make(nn.Linear(DIM, 7, **F64))
    copy_shard(layer, own(whole.weight, rank, dim=1), whole.bias)
    torch.testing.assert_close(layer(own(x, rank, dim=1)), whole(x))
    with pytest.raises(ValueError, match="out_features: got 7; a multiple of 2 is needed"):
        ColumnParallelLinear(DIM, 7, group, multiple_of=2)


def copy_heads(shared: ParallelMHA, whole: MHA, before: int) -> None:
    """before: heads of k and v that lower ranks have."""
    d, group, heads_kv = whole.head_dim, whole.num_heads // whole.num_heads_kv, shared.num_heads_kv
    first_q, first_kv = before * group, before

    def rows(t: Tensor) -> Tensor:
        q, k, v = t.split(
            [d * n for n in (whole.num_heads, whole.num_heads_kv, whole.num_heads_kv)]
        )
        return torch.cat(
            [q.narrow(0, first_q * d, shared.num_heads * d)]
            + [t.narrow(0, first_kv * d, heads_kv * d) for t in (k, v)]
        )

    copy_shard(shared.Wqkv, rows(whole.Wqkv.weight), rows(whole.Wqkv.bias))
    columns = whole.out_proj.weight.narrow(1, first_q * d, shared.num_heads * d)
    copy_shard(shared.out_proj, columns, whole.out_proj.bias)


def check_attention(rank: int, group) -> None:
    batch, seqlen = 2, 4
    for heads, heads_kv, options in (
        (6, 6, {"use_flash_attn": True, "use_alibi": True}),
        (6, 3, {"use_flash_attn": True, "rotary_emb_dim": 4}),  # groups do not divide evenly
        (4, 2, {}),
    ):
        options = {"causal": True, **options, **F64}
        whole = make(MHA(DIM, heads, heads_kv, **options))
        x = torch.randn(batch * seqlen, DIM, **F64)
        for by_rows in (True, False):
            shared = ParallelMHA(DIM, heads, group, heads_kv, sequence_parallel=by_rows, **options)
            copy_heads(shared, whole, before=0 if rank == 0 else heads_kv - shared.num_heads_kv)
            run_both(
                lambda x, whole=whole: whole(x.unflatten(0, (batch, seqlen))).flatten(0, 1),
                shared, x, rank, by_rows, seqlen=seqlen,
            )  # fmt: skip
        dense = x.unflatten(0, (batch, seqlen))
        torch.testing.assert_close(shared(dense), whole(dense))
    with pytest.raises(ValueError, match="1 heads of k and v; each of the 2 ranks needs one"):
        ParallelMHA(DIM, 4, group, 1)


def check_packed_and_cached_attention(rank: int, group) -> None:
    x, ends = torch.randn(7, DIM, **F64), torch.tensor([0, 3, 7], dtype=torch.int32)
    options = {"causal": True, "use_flash_attn": True, "layer_idx": 0, **F64}
    whole = make(MHA(DIM, 4, 2, **options))
    shared = ParallelMHA(DIM, 4, group, 2, sequence_parallel=False, **options)
    copy_heads(shared, whole, before=rank)
    packed = {"cu_seqlens": ends, "max_seqlen": 4}
    torch.testing.assert_close(shared(x, **packed), whole(x, **packed))
    with torch.no_grad():
        state = InferenceParams(max_seqlen=7, max_batch_size=1)
        steps = []
        for part in x[None].split([5, 1, 1], dim=1):
            steps.append(shared(part, inference_params=state))
            state.seqlen_offset += part.shape[1]
        assert state.key_value_memory_dict[0].shape == (1, 7, 2, 1, 6)
        torch.testing.assert_close(torch.cat(steps, 1), whole(x[None]))


def check_embeddings(rank: int, group) -> None:
    ids = torch.randint(0, 10, (4, 3))
    whole = make(GPT2Embeddings(DIM, 10, 3, **F64))
    expected = whole(ids)
    dout = torch.linspace(-1, 1, expected.numel(), **F64).view_as(expected)
    expected.backward(dout)
    for by_rows in (True, False):
        shared = ParallelGPT2Embeddings(DIM, 10, 3, group, sequence_parallel=by_rows, **F64)
        with torch.no_grad():
            shared.word_embeddings.weight.copy_(own(whole.word_embeddings.weight, rank))
            position = own(whole.position_embeddings.weight, rank, dim=1)
            shared.position_embeddings.weight.copy_(position)
        out = shared(ids)
        torch.testing.assert_close(out, own(expected, rank) if by_rows else expected)
        out.backward(own(dout, rank) if by_rows else dout)
        torch.testing.assert_close(
            shared.word_embeddings.weight.grad, own(whole.word_embeddings.weight.grad, rank)
        )
        torch.testing.assert_close(
            shared.position_embeddings.weight.grad,
            own(whole.position_embeddings.weight.grad, rank, dim=1),
        )
        flat = shared(ids, combine_batch_seqlen_dim=True)
        assert flat.dim() == 2
    with pytest.raises(ValueError, match="num_embeddings: got 9; a multiple of the 2 ranks"):
        VocabParallelEmbedding(9, DIM, process_group=group)
    with pytest.raises(ValueError, match="padding_idx: got 0 in a group of 2 ranks"):
        VocabParallelEmbedding(10, DIM, process_group=group, padding_idx=0)
    alone = [dist.new_group([one]) for one in range(WORLD)][rank]
    for of_one in (alone, None):
        embedding = VocabParallelEmbedding(10, DIM, process_group=of_one, padding_idx=3)
        embedding(torch.tensor([2, 3])).sum().backward()
        assert embedding.weight.grad.any(dim=1).nonzero().flatten().tolist() == [2]


def check_helpers(rank: int, group) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    torch.manual_seed(rank)
    for p in model.parameters():
        nn.init.normal_(p)
    model[1].weight._shared_params = True
    before = copy.deepcopy(model)
    distributed.sync_shared_params(model, group)
    gathered = distributed.all_gather_raw(model[1].weight.detach()[None], group)[0]
    assert torch.equal(gathered[0], gathered[1])
    assert torch.equal(model[0].weight, before[0].weight)
    distributed.allreduce_sequence_parallel_grad(model, group)  # nothing to do
    for name in ("weight", "bias"):
        getattr(model[1], name)._sequence_parallel = True
    model[0].weight.grad = torch.ones(3, 3)
    for i, p in enumerate(model[1].parameters()):
        p.grad = torch.full((3,), 1.0 + rank + 10 * i)
    distributed.allreduce_sequence_parallel_grad(model, group)
    assert model[1].weight.grad.tolist() == [3.0] * 3
    assert model[1].bias.grad.tolist() == [23.0] * 3
    assert model[0].weight.grad.eq(1).all()
    with pytest.raises(ValueError, match="input_: got 3 rows; a multiple of 2 ranks"):
        distributed.reduce_scatter_raw(torch.ones(3), group)


CHECKS = [
    check_mlps,
    check_fused_mlp_of_gathered_rows,
    check_linears,
    check_attention,
    check_packed_and_cached_attention,
    check_embeddings,
    check_helpers,
]


def _worker(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    where = f"file://{rendezvous}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORLD)
    try:
        for check in CHECKS:
            torch.manual_seed(1)
            check(rank, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_shared_out_over_two_processes(tmp_path):
    mp.spawn(_worker, args=(str(tmp_path / "rendezvous"),), nprocs=WORLD)


def test_shares():
    shares = [distributed.get_dim_for_local_rank(22, 4, i, multiple_of=2) for i in range(4)]
    assert shares == [6, 6, 6, 4]


def test_without_ranks():
    ids = torch.tensor([[1, 2]])
    embeddings = ParallelGPT2Embeddings(4, 5, 3, None)
    expected = embeddings.word_embeddings.weight[ids] + embeddings.position_embeddings.weight[:2]
    torch.testing.assert_close(embeddings(ids), expected)
