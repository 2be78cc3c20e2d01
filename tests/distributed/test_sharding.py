"""DTensor: attention of sharded heads and batches, and its gradients, are those of the whole."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import flash_attn
from flash_attn.distributed import sharding
from tests.distributed.processes import error_of, group

RANKS = 2
PLACEMENTS = {"heads": Shard(2), "batch": Shard(0), "whole": Replicate()}


def mesh_of(*shape: int) -> DeviceMesh:
    """Of all processes in this shape, or of the first two."""
    sharding.register()
    if shape:
        return init_device_mesh("cpu", shape)
    return DeviceMesh.from_group(group(RANKS), "cpu")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def compare(mesh, placements, inputs, function) -> None:
    """function of whole inputs, and of sharded ones; results and gradients."""
    expected = function(*inputs)
    torch.manual_seed(1)  # on every rank
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, inputs, dout)
    sharded = [
        distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip(inputs, placements)
    ]
    out = function(*sharded)
    assert isinstance(out, DTensor)
    assert list(out.placements) == list(placements[0])
    torch.testing.assert_close(out.full_tensor(), expected)
    replicated = distribute_tensor(dout, mesh, [Replicate()] * mesh.ndim)
    ours = torch.autograd.grad(out, sharded, replicated)
    for mine, whole, placement in zip(ours, gradients, placements):
        assert list(mine.placements) == list(placement)
        torch.testing.assert_close(mine.full_tensor(), whole)


def qkv(*shape: int, heads_k: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [random(*shape, heads, 8) for heads in (4, heads_k, heads_k)]


def dense(rank: int, kind: str) -> None:
    placement = [PLACEMENTS[kind]]
    compare(
        mesh_of(), [placement] * 3, qkv(2, 6),
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0)),
    )  # fmt: skip


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_dense(processes, kind):
    processes.run(dense, kind, ranks=RANKS)


def max_logits(rank: int, shape: tuple[int, ...], placements: list) -> None:
    q, k, v = qkv(2, 6)
    mesh = mesh_of(*shape)
    sharded = [distribute_tensor(x.detach(), mesh, placements) for x in (q, k, v)]
    for of in (True, "row"):
        _, expected = flash_attn.flash_attn_func(q, k, v, causal=True, return_max_logits=of)
        _, found = flash_attn.flash_attn_func(*sharded, causal=True, return_max_logits=of)
        torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_max_logits(processes, kind):
    processes.run(max_logits, (), [PLACEMENTS[kind]], ranks=RANKS)


def test_max_logits_over_two_dimensions(processes):
    processes.run(max_logits, (2, 2), [Shard(0), Shard(2)], ranks=4)


def over_two_dimensions(rank: int) -> None:
    compare(
        mesh_of(2, 2), [[Shard(0), Shard(2)]] * 3, qkv(2, 6),
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v),
    )  # fmt: skip


def test_batch_and_heads_at_once(processes):
    processes.run(over_two_dimensions, ranks=4)


def with_scores(rank: int) -> None:
    """Slopes and sinks are per head."""
    torch.manual_seed(2)  # on every rank
    mesh = mesh_of()
    per_head = {"alibi_slopes": torch.rand(4), "s_aux": torch.randn(4, dtype=torch.float64)}

    def attend(q, k, v):
        options = per_head
        if isinstance(q, DTensor):
            options = {n: distribute_tensor(x, mesh, [Shard(0)]) for n, x in per_head.items()}
        return flash_attn.flash_attn_func(q, k, v, **options)

    compare(mesh, [[Shard(2)]] * 3, qkv(2, 6), attend)


def test_scores(processes):
    processes.run(with_scores, ranks=RANKS)


def packed(rank: int, implicit: bool) -> None:
    mesh, ends = mesh_of(), torch.tensor([0, 4, 9], dtype=torch.int32)

    def attend(q, k, v):
        lengths = ends
        if isinstance(q, DTensor) and not implicit:
            lengths = distribute_tensor(ends, mesh, [Replicate()])
        return flash_attn.flash_attn_varlen_func(q, k, v, lengths, lengths, 5, 5, causal=True)

    with implicit_replication() if implicit else nullcontext():
        compare(mesh, [[Shard(1)]] * 3, qkv(9), attend)


@pytest.mark.parametrize("implicit", [False, True])
def test_packed(processes, implicit):
    processes.run(packed, implicit, ranks=RANKS)


def appended(rank: int, kind: str) -> None:
    mesh, placement = mesh_of(), [PLACEMENTS[kind]]
    torch.manual_seed(0)
    whole = [torch.randn(2, n, h, 8) for n, h in ((1, 4), (16, 2), (16, 2), (1, 2), (1, 2))]
    used = torch.tensor([3, 7], dtype=torch.int32)
    sharded = [distribute_tensor(x, mesh, placement) for x in whole]
    used_there = distribute_tensor(used, mesh, [Shard(0) if kind == "batch" else Replicate()])
    out = flash_attn.flash_attn_with_kvcache(*sharded, cache_seqlens=used_there, causal=True)
    expected = flash_attn.flash_attn_with_kvcache(*whole, cache_seqlens=used, causal=True)
    torch.testing.assert_close(out.full_tensor(), expected)
    for mine, theirs in zip(sharded[1:3], whole[1:3]):
        assert torch.equal(mine.full_tensor(), theirs)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_an_append_reaches_every_shard(processes, kind):
    processes.run(appended, kind, ranks=RANKS)


def codes(rank: int, kind: str, per_row: bool) -> None:
    """A cache of codes, whose descales are shared as its heads or the entries of the batch are."""
    mesh = mesh_of()
    torch.manual_seed(0)
    whole = [torch.randn(2, n, h, 8) for n, h in ((1, 4), (16, 2), (16, 2), (1, 2), (1, 2))]
    whole[1:3] = (x.to(torch.float8_e4m3fn) for x in whole[1:3])
    descale = torch.rand(2, 16, 2) + 0.5 if per_row else torch.rand(2, 2) + 0.5
    used = torch.tensor([3, 7], dtype=torch.int32)

    def shared(x: torch.Tensor, heads: int) -> DTensor:
        """Without messages, which have no codes."""
        at = {"batch": 0, "heads": heads}.get(kind)
        local = x if at is None else x.chunk(RANKS, at)[rank].contiguous()
        return DTensor.from_local(local.clone(), mesh, [Replicate() if at is None else Shard(at)])

    sharded = [shared(x, 2) for x in whole]
    options = {"cache_seqlens": shared(used, 0) if kind == "batch" else
               distribute_tensor(used, mesh, [Replicate()])}  # fmt: skip
    there = shared(descale, descale.dim() - 1)
    out = flash_attn.flash_attn_with_kvcache(
        *sharded, **options, causal=True, k_descale=there, v_descale=there
    )
    expected = flash_attn.flash_attn_with_kvcache(
        *whole, cache_seqlens=used, causal=True, k_descale=descale, v_descale=descale
    )
    torch.testing.assert_close(out.full_tensor(), expected)
    for mine, theirs in zip(sharded[1:3], whole[1:3]):
        assert torch.equal(mine.to_local().float(), shared(theirs, 2).to_local().float())
    if kind != "whole":
        replicated = distribute_tensor(descale, mesh, [Replicate()])
        with pytest.raises((ValueError, RuntimeError), match=r"k_descale: sharded by .* alike"):
            flash_attn.flash_attn_with_kvcache(
                *sharded, **options, k_descale=replicated, v_descale=there
            )


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_descales_are_shared_as_codes_are(processes, kind, per_row):
    processes.run(codes, kind, per_row, ranks=RANKS)


def latent(rank: int, kind: str) -> None:
    """A cache of latent rows: qv is shared as q is."""
    mesh, placement = mesh_of(), [PLACEMENTS[kind]]
    torch.manual_seed(0)
    q, k, v, qv = (torch.randn(2, *n) for n in ((1, 4, 8), (16, 2, 8), (16, 2, 40), (1, 4, 40)))
    sharded = [distribute_tensor(x, mesh, placement) for x in (q, k, v, qv)]
    out = flash_attn.flash_attn_with_kvcache(*sharded[:3], qv=sharded[3])
    expected = flash_attn.flash_attn_with_kvcache(q, k, v, qv=qv)
    torch.testing.assert_close(out.full_tensor(), expected)
    if kind != "whole":
        replicated = distribute_tensor(qv, mesh, [Replicate()])
        with pytest.raises((ValueError, RuntimeError), match=r"qv: sharded by .* alike"):
            flash_attn.flash_attn_with_kvcache(*sharded[:3], qv=replicated)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_latent_queries_are_shared_as_queries_are(processes, kind):
    processes.run(latent, kind, ranks=RANKS)


def gradient_of_sinks(rank: int) -> str:
    mesh = mesh_of()
    inputs = [distribute_tensor(x.detach(), mesh, [Shard(2)]) for x in qkv(2, 6)]
    sinks = distribute_tensor(torch.zeros(4), mesh, [Shard(0)]).requires_grad_()
    out = flash_attn.flash_attn_func(*inputs, s_aux=sinks)
    return error_of((NotImplementedError, RuntimeError), out.sum().backward)


def test_sinks_have_no_gradient(processes):
    for said in processes.run(gradient_of_sinks, ranks=RANKS):
        assert "s_aux has no gradient with DTensor" in said


def paged(rank: int) -> None:
    """Pages of four rows, for a chunk of one prompt and a token of another."""
    torch.manual_seed(0)  # on every rank
    mesh, (q, k, v) = mesh_of(), (x.detach() for x in qkv(5))
    k, v = (torch.randn(4, 4, *x.shape[1:], dtype=x.dtype) for x in (k, v))
    whole = (torch.tensor([0, 4, 5]), torch.tensor([0, 6, 9]), torch.tensor([[2, 0], [1, 3]]))
    ends_q, ends_k, pages = (x.int() for x in whole)

    def attend(q, k, v):
        return flash_attn.flash_attn_varlen_func(
            q, k, v, ends_q, ends_k, 4, 6, causal=True, block_table=pages
        )

    shards = [distribute_tensor(x, mesh, [Shard(x.ndim - 2)]) for x in (q, k, v)]
    with implicit_replication():
        ours = attend(*shards).full_tensor()
    torch.testing.assert_close(ours, attend(q, k, v))


def test_pages(processes):
    processes.run(paged, ranks=RANKS)


ERRORS = (ValueError, NotImplementedError, RuntimeError)
REFUSED = {
    "sequence": ([Shard(1)] * 3, 2, r"sequences that ranks share"),
    "partial": ([Partial()] * 3, 2, r"sequences that ranks share"),
    "unlike": ([Shard(2), Replicate(), Replicate()], 2, r"redistribute them to be alike"),
    "heads": ([Shard(2)] * 3, 1, r"k: got 1 heads for 2 ranks"),
}


def refused(rank: int, why: str) -> str:
    placements, heads_k, _ = REFUSED[why]
    mesh = mesh_of()
    inputs = [
        DTensor.from_local(x.detach(), mesh, [p], run_check=False)
        if p.is_partial()
        else distribute_tensor(x.detach(), mesh, [p])
        for x, p in zip(qkv(2, 6, heads_k=heads_k), placements)
    ]
    return error_of(ERRORS, flash_attn.flash_attn_func, *inputs)


def with_dropout(rank: int) -> str:
    """Also after a call that differs in nothing else."""
    mesh = mesh_of()
    inputs = [distribute_tensor(x.detach(), mesh, [Shard(2)]) for x in qkv(2, 6)]
    with implicit_replication():
        flash_attn.flash_attn_func(*inputs)
        return error_of(ERRORS, flash_attn.flash_attn_func, *inputs, dropout_p=0.1)


def test_dropout_raises(processes):
    for said in processes.run(with_dropout, ranks=RANKS):
        assert "there is no dropout with DTensor" in said


@pytest.mark.parametrize("why", REFUSED)
def test_other_placements_raise(processes, why):
    for said in processes.run(refused, why, ranks=RANKS):
        assert re.search(REFUSED[why][2], said), said
