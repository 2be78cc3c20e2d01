"""Varlen problems: a `Case` and lengths become packed tensors, our call and the references."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from cases import OFFSET, SEED, Case, padded_on_gpu, poisoned, rng_state, values
from reference import random_slopes, varlen_ref
from reference_dropout import keep_mask
from torch import Tensor

from flash_attn import flash_attn_varlen_func

LENGTHS = {
    "mixed": ([17, 113, 1, 64], [17, 113, 1, 64]),
    "keys_longer": ([5, 1, 40, 129], [100, 33, 41, 260]),
    "queries_longer": ([100, 33, 41], [5, 1, 40]),
    "zeros": ([0, 20, 0, 7, 0], [0, 20, 9, 0, 0]),
    "one": ([70], [90]),
    "many_short": ([1, 2, 3, 1, 2, 3, 1, 1] * 2, [4, 3, 2, 1, 1, 2, 3, 9] * 2),
}


@dataclass
class Packed:
    """Inputs of one varlen call; the rows past the last sequence hold NaN."""

    q: Tensor  # (total_q + spare, h, d)
    k: Tensor  # (total_k + spare, hk, d)
    v: Tensor  # (total_k + spare, hk, dv)
    dout: Tensor  # (total_q + spare, h, dv)
    cu_q: list[int]
    cu_k: list[int]
    alibi_slopes: Tensor | None
    s_aux: Tensor | None
    keep_mask: Tensor | None  # (b, h, max_sq, max_sk)
    device: str
    spare: int

    @property
    def max_q(self) -> int:
        return max(b - a for a, b in zip(self.cu_q, self.cu_q[1:]))

    @property
    def max_k(self) -> int:
        return max(b - a for a, b in zip(self.cu_k, self.cu_k[1:]))

    @property
    def lengths(self) -> dict:
        """The four arguments that say where sequences begin."""
        return {
            "cu_seqlens_q": torch.tensor(self.cu_q, dtype=torch.int32, device=self.device),
            "cu_seqlens_k": torch.tensor(self.cu_k, dtype=torch.int32, device=self.device),
            "max_seqlen_q": self.max_q,
            "max_seqlen_k": self.max_k,
        }


def tail(x: Tensor, spare: int) -> Tensor:
    """`spare` rows of NaN after x, all of it inside a larger poisoned tensor."""
    nan = x.new_full((spare, *x.shape[1:]), float("nan"))
    return poisoned(torch.cat([x, nan]))


def pack(case: Case, lengths: tuple[list[int], list[int]], device, spare: int = 5) -> Packed:
    gen = torch.Generator().manual_seed(case.seed)
    total_q, total_k = sum(lengths[0]), sum(lengths[1])
    batch = len(lengths[0])

    def rows(total, heads, dim, role):
        kind = "normal" if role == "dout" else case.kind
        x = values(kind, (1, total, heads, dim), role, gen)[0]
        return tail(x.to(case.dtype).to(device), spare)

    slopes = s_aux = keep = None
    if case.alibi:
        shape = (case.h,) if case.alibi == "h" else (batch, case.h)
        slopes = random_slopes(shape, gen).to(device)
    if case.sinks:
        s_aux = torch.randn(case.h, generator=gen).to(device)
    if case.dropout_p > 0:
        sizes = (batch, case.h, max(lengths[0]), max(lengths[1]))
        keep = keep_mask(SEED, OFFSET, *sizes, case.dropout_p).to(device)
    return Packed(
        rows(total_q, case.h, case.d, "q"),
        rows(total_k, case.hk, case.d, "k"),
        rows(total_k, case.hk, case.value_dim, "v"),
        rows(total_q, case.h, case.value_dim, "dout"),
        [0, *accumulate(lengths[0])],
        [0, *accumulate(lengths[1])],
        slopes,
        s_aux,
        keep,
        device,
        spare,
    )


def in_pages(ends: list[int], page_size: int, *packed: Tensor) -> tuple[Tensor, ...]:
    """A table of pages in any order, and the pages of each packed tensor, NaN in rows of none."""
    columns = -(-max(stop - start for start, stop in pairwise(ends)) // page_size)
    table = torch.randperm((len(ends) - 1) * columns, device=packed[0].device).view(-1, columns)
    shape = table.numel(), page_size
    caches = [x.new_full((*shape, *x.shape[1:]), float("nan")) for x in packed]
    for pages, (start, stop) in zip(table, pairwise(ends), strict=True):
        row = torch.arange(stop - start, device=table.device)
        for cache, x in zip(caches, packed, strict=True):
            cache[pages[row // page_size], row % page_size] = x[start:stop]
    return table.int(), *caches


def run_packed(case: Case, x: Packed, q, k, v, s_aux=None, **extra):
    """out, lse; through the op where the public function has no such argument."""
    if case.dropout_p == 0 and not extra:
        return flash_attn_varlen_func(
            q, k, v, **x.lengths, softmax_scale=case.scale, softcap=case.softcap,
            alibi_slopes=x.alibi_slopes, s_aux=s_aux, return_lse=True, **case.mask_kwargs(),
        )  # fmt: skip
    dropout = {"rng_state": rng_state(q.device)} if case.dropout_p else {}
    out, lse, _, _ = torch.ops.flash_attn._flash_attn_varlen_forward(
        *padded_on_gpu(q, k, v),
        *x.lengths.values(),
        *case.scoring(x.alibi_slopes),
        s_aux=s_aux,
        **dropout,
        **extra,
    )
    return out[..., : case.value_dim], lse


def written_out(case: Case, x: Packed, attention, **lists):
    def call(q, k, v, s_aux=None):
        rest = case.reference_kwargs(x) | lists
        return varlen_ref(attention, q, k, v, x.cu_q, x.cu_k, s_aux=s_aux, **rest)

    return call
