"""The rotary operation: schema, what serves it, and how a rotation becomes a call of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn import backend
from flash_attn.cpu.rotary_layer import rotary as on_torch
from flash_attn.dispatch import (
    direct,
    ops,  # noqa: F401  loads the compiled library
    run,
    versions,
)
from flash_attn.dispatch.define import defined

__all__ = ["Parts", "Turn", "rotate"]

SCHEMAS = {
    "_rotary": (
        "(Tensor(a!) out, Tensor x, Tensor(b!)? out_k, Tensor? k, Tensor(c!)? out_rest, "
        "Tensor? rest, Tensor cos, Tensor sin, Tensor? cos_k, Tensor? sin_k, SymInt offset, "
        "Tensor? offsets, Tensor? cu_seqlens, bool interleaved, bool conjugate) -> ()"
    )
}
CPU = {"_rotary": on_torch}
KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})

_library = defined(SCHEMAS)
_library.impl("_rotary", CPU["_rotary"], "CPU")
_operation = torch.ops.flash_attn._rotary

torch.library.register_fake("flash_attn::_rotary", lambda *_: None, lib=_library)
versions.register(_library, _operation.default)
if not torch._C._dispatch_has_kernel_for_dispatch_key("flash_attn::_rotary", "CUDA"):
    _library.impl("_rotary", backend.missing_kernel("_rotary"), "CUDA")
direct.register(_operation.default)


class Turn(NamedTuple):
    """What rotates a call's tokens. The tensors first: they are what a backward keeps."""

    cos: Tensor  # (seqlen_ro, rotary_dim / 2), or (1 or batch, seqlen, rotary_dim / 2)
    sin: Tensor
    cos_k: Tensor | None  # k's own, where it has them
    sin_k: Tensor | None
    offsets: Tensor | None  # (batch,) first position of each sequence; None: `offset`
    cu_seqlens: Tensor | None
    offset: int  # first position of all sequences, without `offsets`
    interleaved: bool

    def tables(self) -> list[Tensor]:
        own = [self.cos, self.sin, self.cos_k, self.sin_k]
        return [table for table in own if table is not None]


class Parts(NamedTuple):
    """(batch, seqlen, heads, head_dim) each, or packed (total, heads, head_dim)."""

    x: Tensor
    k: Tensor | None = None
    rest: Tensor | None = None  # does not turn: copied where the result is a new tensor

    def present(self) -> list[Tensor]:
        return [part for part in self if part is not None]


def kernel_takes(tensors: list[Tensor], turn: Turn) -> bool:
    """Whether the CUDA kernel serves these inputs and outputs; torch serves the rest."""
    dtype, columns = tensors[0].dtype, tensors[0].shape[-1]
    if dtype not in KERNEL_DTYPES:
        return False
    for t in tensors:
        if t.dtype != dtype or t.shape[-1] != columns or t.stride(-1) != 1:
            return False
    return turn.cos_k is None or turn.cos_k.shape == turn.cos.shape


def _by_operation(out: Parts, x: Parts, turn: Turn) -> bool:
    # Subclasses of tensors have rules for torch's operations and none for this one.
    if run.traced() or type(x.x) not in (Tensor, torch.nn.Parameter):
        return False
    if x.x.is_cuda:
        tensors = x.present() if out is x else x.present() + out.present()
        return backend.has_kernel("_rotary") and kernel_takes(tensors, turn)
    return x.x.is_cpu


def rotate(out: Parts, x: Parts, turn: Turn, conjugate: bool) -> None:
    """Writes x, turned or turned back, to out, which may be x. Autograd does not record it, but
    where ``run.traced``."""
    pairs = (part for pair in zip(out, x) for part in pair)
    call = (*pairs, *_prepared(x.x, turn), turn.interleaved, conjugate)
    if _by_operation(out, x, turn):
        run.writing(_operation.default, *call)
    else:
        on_torch(*call)


def _prepared(x: Tensor, turn: Turn) -> tuple:
    """Tables and places as the operation takes them."""
    tables: list[Tensor | None] = [turn.cos, turn.sin, turn.cos_k, turn.sin_k]
    dtypes = {table.dtype for table in turn.tables()}
    if dtypes not in ({x.dtype}, {torch.float32}):
        compute = torch.promote_types(x.dtype, torch.float32)
        tables = [None if t is None else t.to(compute) for t in tables]
    tables = [t if t is None or t.stride(-1) == 1 else t.contiguous() for t in tables]
    if turn.cos.dim() == 3:  # a row for each token, whatever its position
        return *tables, 0, None, None
    offsets, cu_seqlens = turn.offsets, turn.cu_seqlens
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if offsets is not None:
        offsets = offsets.expand(batch).to(torch.int32).contiguous()
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
    return *tables, turn.offset, offsets, cu_seqlens
