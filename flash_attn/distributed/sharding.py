"""Rules by which the operations take ``DTensor``: whole heads, or whole entries of a batch.

A rank with some of the heads, or of the batch, needs nothing of the others, forward and backward.
Sequences are another matter: ``flash_attn.distributed`` has attention for those that are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["register"]


class _Dims(NamedTuple):
    """Which dimension of a tensor counts what; from the end where negative, None where none; how
    it is reduced over what."""

    batch: int | str | None
    heads: int | None


_WHOLE = _Dims(None, None)
_MAXIMA = _Dims("max", 0)  # each rank's are of its entries
_ROWS = _Dims(0, 2)  # (batch, seqlen, heads, head_dim)
_PER_HEAD = _Dims(None, 0)
_PER_ENTRY = _Dims(0, None)
_INPUTS_AND_GRADIENTS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")

_DENSE = {
    **dict.fromkeys(_INPUTS_AND_GRADIENTS, _ROWS),
    **dict.fromkeys(("softmax_lse", "softmax_d", "dlse", "score_output"), _Dims(0, 1)),
    "s_aux": _PER_HEAD,
}
# Packed sequences are no entries of a batch. k and v may be pages, so heads count from the end.
_PACKED = {
    **dict.fromkeys((*_INPUTS_AND_GRADIENTS, "qv"), _Dims(None, -2)),
    **dict.fromkeys(("softmax_lse", "softmax_d", "dlse"), _PER_HEAD),
    "score_output": _Dims(None, 1),
    "s_aux": _PER_HEAD,
    **dict.fromkeys(("k_descale", "v_descale"), _Dims(None, -1)),
}
_CACHE = {
    **dict.fromkeys(("q", "k", "v", "out", "k_cache", "v_cache", "qv"), _ROWS),
    "softmax_lse": _Dims(0, 1),
    **dict.fromkeys(("cache_seqlens", "cache_leftpad"), _PER_ENTRY),
    "s_aux": _PER_HEAD,
    **dict.fromkeys(("k_descale", "v_descale"), _Dims(0, -1)),
}
# Entries of the cache are then no entries of the batch.
_INDIRECT = ("block_table", "cache_batch_idx")
_RULES = {
    "_flash_attn_forward": _DENSE,
    "_flash_attn_backward": _DENSE,
    "_flash_attn_varlen_forward": _PACKED,
    "_flash_attn_varlen_backward": _PACKED,
    "_flash_attn_with_kvcache": _CACHE,
}
# Placed alike, or the operation would write into copies; DTensor places no keywords otherwise.
_ALIKE = ("q", "k", "v", "k_cache", "v_cache", "dq", "dk", "dv", "k_descale", "v_descale", "qv")


def register() -> None:
    """Makes attention of ``DTensor`` run on each rank's heads, or entries of the batch.

    Shard q, k and v along one of them, all alike, or replicate them; for heads, each rank has to
    have as many of k and v as any other. A gradient is placed as its tensor is. Other tensors of
    the call (``alibi_slopes``, ``cu_seqlens``) are DTensor too, or the call is made under
    ``torch.distributed.tensor.experimental.implicit_replication``. There is no dropout, and no
    gradient of ``s_aux``.
    """
    for name, dims in _RULES.items():
        operation = getattr(torch.ops.flash_attn, name).default
        register_sharding(operation)(_rule(operation, dims))
        _tell_calls_apart(operation)


def _tell_calls_apart(operation: torch._ops.OpOverload) -> None:
    """A rule is asked once for calls that are alike, which register_sharding takes to be those of
    the same tensors and integers. By these rules dropout and keywords count too."""
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    keywords = [a.name for a in operation._schema.arguments if a.kwarg_only]
    known[operation] = replace(known[operation], static_argnum=0, static_kwargkey=keywords)


def _rule(operation: torch._ops.OpOverload, dims: dict[str, _Dims]) -> Callable[..., list]:
    names = [argument.name for argument in operation._schema.arguments]
    results = [result.name.removesuffix("_out") for result in operation._schema.returns]

    def rule(*args: Any, **kwargs: Any) -> list[tuple[list, list]]:
        """Outputs' and inputs' placements for each kind of mesh dimension that this call has."""
        given = {**dict(zip(names, args)), **kwargs}
        if _is_tensor(given.get("ds_aux")):
            # DTensor takes a keyword that is written for the one result, and places them alike.
            raise NotImplementedError("flash_attn: s_aux has no gradient with DTensor; detach it")
        if given.get("dropout_p", 0.0) > 0:
            # The bits are those of a head and an entry by number, and a rank counts from its first.
            raise NotImplementedError("flash_attn: there is no dropout with DTensor")
        of = {name: _dims_of(name, spec, dims) for name, spec in given.items() if _is_tensor(spec)}
        kinds = _kinds(given, of)
        inputs = [name for name in names if name in given]
        returned = {name: _dims_of(name, given["q"], dims) for name in results}
        if given.get("max_logits_of_heads", False):  # which come in its place
            returned["score_output"] = _MAXIMA
        elif given.get("return_max_logits", False):
            returned["score_output"] = returned["softmax_lse"]
        elif not given.get("return_softmax", False):
            returned["score_output"] = _WHOLE
        return [
            (
                [_placement(returned[name], kind) for name in results],
                [_placement(of[name], kind) if name in of else None for name in inputs],
            )
            for kind in kinds
        ]

    return rule


def _is_tensor(spec: Any) -> bool:
    return hasattr(spec, "placements")


def _dims_of(name: str, spec: Any, dims: dict[str, _Dims]) -> _Dims:
    if name == "alibi_slopes":  # (heads,) or (batch, heads)
        return _PER_HEAD if spec.ndim == 1 else _Dims(0, 1)
    batch, heads = dims.get(name, _WHOLE)
    return _Dims(batch, heads if heads is None or heads >= 0 else heads + spec.ndim)


def _placement(dims: _Dims, kind: str) -> Placement:
    dim = getattr(dims, kind, None)
    if isinstance(dim, str):
        return Partial(dim)
    return Replicate() if dim is None else Shard(dim)


def _kinds(given: dict[str, Any], of: dict[str, _Dims]) -> Sequence[str]:
    """What the mesh's dimensions split: "whole" (nothing), "batch", "heads", in this order.

    Sharding what is replicated costs nothing, and of equal costs the first is taken.
    """
    per_dim = None
    for name in _ALIKE:
        if name not in of:
            continue
        found = [_kind(name, placement, of[name]) for placement in given[name].placements]
        if per_dim is not None and found != per_dim:
            raise ValueError(
                f"{name}: sharded by {found} over the dimensions of the mesh, q by {per_dim}; "
                "redistribute them to be alike"
            )
        per_dim = found
    if "batch" in per_dim:
        shared = [n for n in (*_INDIRECT, "s_aux") if _is_tensor(given.get(n))]
        if shared:
            raise NotImplementedError(
                f"flash_attn: {shared[0]} with DTensor that are sharded by batch; shard by heads"
            )
    k = given.get("k_cache", given["k"])
    ranks = prod(n for n, kind in zip(k.mesh.shape, per_dim) if kind == "heads")
    heads_k = k.shape[-2]
    if heads_k % ranks:
        raise ValueError(f"k: got {heads_k} heads for {ranks} ranks; a multiple is needed")
    return sorted(set(per_dim), key=("whole", "batch", "heads").index)


def _kind(name: str, placement: Placement, dims: _Dims) -> str:
    if placement.is_replicate():
        return "whole"
    for kind in ("batch", "heads"):
        if getattr(dims, kind) is not None and placement.is_shard(getattr(dims, kind)):
            return kind
    raise NotImplementedError(
        f"flash_attn: {name} is placed by {placement}; whole, by heads or by batch is served, and "
        "flash_attn.distributed has attention for sequences that ranks share"
    )
