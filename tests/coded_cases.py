"""Calls whose q, k and v are codes: a `Case` in codes, its descales, and the numbers these are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases import BF16, Case, Inputs, make_inputs, poisoned
from fp8_cases import decoded, nearest
from packed_cases import Packed, pack
from torch import Tensor

#: How descales of q, k and v are given: not at all, as numbers, per sequence and KV head.
KINDS = {
    "none": ("none", "none", "none"),
    "number": ("number", "number", "number"),
    "head": ("head", "head", "head"),
    "mixed": ("number", "head", "none"),
}


@dataclass
class Coded:
    """Codes of inputs, and what they stand for."""

    codes: dict[str, Tensor]  # q, k, v
    descales: dict  # q_descale, … as the call takes them
    numbers: dict[str, Tensor]  # q, k, v, float64

    def in_dtype(self, dtype: torch.dtype) -> list[Tensor]:
        return [x.to(dtype) for x in self.numbers.values()]


def descale(kind: str, shape: tuple[int, int], gen: torch.Generator, device) -> tuple:
    """One argument, and its numbers (b, hk)."""
    if kind == "none":
        return None, torch.ones(shape, device=device)
    if kind == "number":
        return 0.75, torch.full(shape, 0.75, device=device)
    of_heads = (torch.rand(shape, generator=gen) + 0.5).to(device)
    return poisoned(of_heads.t()).t(), of_heads


def make_coded(case: Case, kind: str, device) -> tuple[Inputs, Coded]:
    """A dense call; the codes have NaN around them."""
    x = make_inputs(case, device)
    shape = (case.b, case.hk)
    rows = lambda of_heads: of_heads[:, None]  # noqa: E731
    return x, _coded([x.q, x.k, x.v], shape, kind, rows, device)


def pack_coded(case: Case, lengths: tuple, kind: str, device) -> tuple[Packed, Coded]:
    """A packed call; what no sequence has is NaN."""
    x = pack(case, lengths, device)
    shape = (len(lengths[0]), case.hk)
    sequences = [torch.arange(shape[0]).repeat_interleave(torch.tensor(n)) for n in lengths]

    def rows(of_heads: Tensor, total: int) -> Tensor:
        sequence = sequences[0] if total == x.q.shape[0] else sequences[1]
        spread = of_heads.new_ones(total, of_heads.shape[1])
        spread[: len(sequence)] = of_heads[sequence.to(of_heads.device)]
        return spread

    coded = _coded([x.q, x.k, x.v], shape, kind, None, device, rows)
    q, k, v = coded.in_dtype(BF16)
    return replace(x, q=q, k=k, v=v), coded


def _coded(tensors, shape, kind, rows, device, packed_rows=None) -> Coded:
    gen = torch.Generator().manual_seed(11)
    codes, descales, numbers = {}, {}, {}
    for name, x, how in zip("qkv", tensors, KINDS[kind], strict=True):
        given, of_heads = descale(how, shape, gen, device)
        scale = packed_rows(of_heads, x.shape[0]) if rows is None else rows(of_heads)
        scale = scale.repeat_interleave(x.shape[-2] // scale.shape[-1], -1)[..., None]
        codes[name] = poisoned(nearest((x.float() / scale).contiguous()))
        descales[f"{name}_descale"] = given
        numbers[name] = decoded(codes[name]) * scale.double()
    return Coded(codes, descales, numbers)
