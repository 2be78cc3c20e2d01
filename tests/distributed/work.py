"""What a rank does in a case; imported by the processes that serve it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_attn import distributed
from flash_attn.call import MaxLogits
from flash_attn.distributed import shard_sequence
from tests.distributed.cases import Case, Inputs, inputs, seed
from tests.distributed.processes import group

_meshes: dict[tuple, DeviceMesh] = {}


def place(case: Case):
    """The group or the mesh of a case."""
    if case.method != "mesh":
        return group(case.ranks)
    shape = (case.ranks // case.split, case.split)
    key = (shape, case.device)
    if key not in _meshes:
        ranks = torch.arange(case.ranks).view(shape)
        _meshes[key] = DeviceMesh(case.device, ranks, mesh_dim_names=("ring", "heads"))
    return _meshes[key]


def attend(
    case: Case, rank: int, leaves: dict[str, Tensor], layout, max_logits: MaxLogits = False
) -> tuple[Tensor, ...]:
    options, slopes = case.options(), case.slopes()
    if case.method != "all_to_all":
        options["gradient_dtype"] = case.gradient_dtype
    function = getattr(distributed, f"{case.method}_attention")
    return function(
        leaves["q"], leaves["k"], leaves["v"], layout, place(case), **options,
        alibi_slopes=None if slopes is None else slopes.to(case.device),
        s_aux=leaves.get("s_aux"), return_lse=True, deterministic=case.deterministic,
        return_max_logits=max_logits,
    )  # fmt: skip


def max_logits(rank: int, case: Case) -> dict:
    """This rank's largest logits, of rows and of heads."""
    leaves, _ = shards(rank, case, inputs(case))
    seed(rank)
    _, lse, rows = attend(case, rank, leaves, case.layout(), "row")
    seed(rank)
    _, _, heads = attend(case, rank, leaves, case.layout(), True)
    assert rows.shape == lse.shape
    assert not rows.requires_grad
    assert not heads.requires_grad
    return {"max_logits": rows.cpu().numpy(), "heads": heads.cpu().numpy()}


def shards(rank: int, case: Case, given: Inputs):
    """This rank's leaves, and what takes its part of a tensor."""
    layout = case.layout()

    def mine(name: str, x: Tensor) -> Tensor:
        x = x.to(case.device)
        if name == "s_aux":
            return x
        dim = (1 if name == "dlse" else 0) if case.packed else (2 if name == "dlse" else 1)
        return shard_sequence(x, layout, rank, dim)

    return {n: mine(n, x).clone().requires_grad_() for n, x in given.tensors.items()}, mine


def attention(rank: int, case: Case) -> dict:
    """This rank's out, lse and gradients, as arrays."""
    given = inputs(case)
    leaves, mine = shards(rank, case, given)
    seed(rank)
    out, lse = attend(case, rank, leaves, case.layout())
    loss = (out * mine("dout", given.dout)).sum()
    if case.dlse:
        finite = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
        loss = loss + (finite * mine("dlse", given.dlse)).sum()
    loss.backward()
    results = {"out": out, "lse": lse} | {f"d{n}": x.grad for n, x in leaves.items()}
    return {n: x.detach().to(_wire(x)).cpu().numpy() for n, x in results.items()}


def _wire(x: Tensor) -> torch.dtype:
    """numpy has no bfloat16."""
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype
