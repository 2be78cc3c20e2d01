"""Calls whose q, k and v are codes: a `Case` in codes, its descales, and the numbers these are; and
small ones, whose numbers do not matter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases import BF16, Case, Inputs, make_inputs, poisoned
from fp8_cases import codes, decoded, nearest
from packed_cases import Packed, pack
from torch import Tensor

from flash_attn.call import CodedForward, Keys, Lengths, Scoring

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


# --- Small calls ----------------------------------------------------------------------------------

B, S, H, HK, D = 2, 9, 4, 2, 32


def dense_of(device) -> dict:
    """A call, by name."""
    return {"q": codes(device, B, S, H, D), "k": codes(device, B, S, HK, D),
            "v": codes(device, B, S, HK, D)}  # fmt: skip


def packed_of(device) -> dict:
    ends = torch.tensor([0, 4, S], dtype=torch.int32, device=device)
    return {
        "q": codes(device, S, H, D), "k": codes(device, S, HK, D), "v": codes(device, S, HK, D),
        "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 5, "max_seqlen_k": 5,
    }  # fmt: skip


def pages_of(device) -> dict:
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=device)
    pages = {name: codes(device, 4, 8, HK, D) for name in "kv"}
    return packed_of(device) | pages | {"block_table": table}


def call_of(inputs: dict, **more) -> CodedForward:
    lengths = None
    if "cu_seqlens_q" in inputs:
        lengths = Lengths(*(inputs[name] for name in Lengths._fields))
    scoring = Scoring(0.0, 0.3, True, -1, -1, 0.0, None, None)
    keys = Keys(inputs.get("block_table"))
    return CodedForward(*(inputs[x] for x in "qkv"), scoring, lengths, keys, **more)
