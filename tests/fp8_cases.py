"""Caches of codes: those of a `CacheCase`, its descales, and e4m3 written out.

Nothing here shares code with the package: codes are decoded by the format's definition, and encoded
by a search among the numbers they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cache_cases import CacheCase, CacheInputs, make_cache
from cases import poisoned
from reference_cache import cache_slot
from torch import Tensor

FP8 = torch.float8_e4m3fn
NAN_CODE = 0x7F
#: How descales are given: not at all, as a number, per sequence and head, per row and head.
KINDS = ("none", "number", "head", "row")


def code_values() -> Tensor:
    """(256,) float64: sign, four bits of exponent with bias 7, three of mantissa; no infinities."""
    code = torch.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).double() / 8
    size = torch.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    size[(code & 0x7F) == NAN_CODE] = float("nan")
    return torch.where(code < 128, size, -size)


VALUES = code_values()


def codes(device, *shape: int) -> Tensor:
    return torch.randn(*shape).to(FP8).to(device)


def moved(x, device):
    return x.to(device) if isinstance(x, Tensor) else x


def bits(codes: Tensor) -> Tensor:
    """uint8 on the host, with one NaN for both."""
    found = codes.cpu().contiguous().view(torch.uint8)
    return torch.where((found & 0x7F) == NAN_CODE, NAN_CODE, found)


def decoded(codes: Tensor) -> Tensor:
    """float64, before any descale."""
    return VALUES[bits(codes).long()].to(codes.device)


def nearest(x: Tensor) -> Tensor:
    """The codes nearest to x float32, of two the even one; infinities become the largest."""
    numbers = VALUES[:NAN_CODE]
    size = x.cpu().double().abs()
    halfway = (numbers[1:] + numbers[:-1]) / 2
    below = torch.searchsorted(halfway, size.contiguous())
    tie = torch.isin(size, halfway) & (below % 2 == 1)
    code = (below + tie.long()) | torch.signbit(x.cpu()).long() * 128
    code[size.isnan()] = NAN_CODE
    return code.to(torch.uint8).view(FP8).to(x.device)


@dataclass
class CodedInputs:
    """A case with its cache as it is in 16 bits, and in codes."""

    plain: CacheInputs
    coded: CacheInputs
    descales: dict  # k_descale, v_descale as the call takes them
    per_row: dict[str, Tensor]  # "k" and "v": float32 (pages or batch, rows, hk), NaN elsewhere

    def numbers(self, name: str) -> Tensor:
        """float64 (pages or batch, rows, hk, d): what the cache "k" or "v" holds now."""
        cache = getattr(self.coded, f"{name}_cache")
        return decoded(cache) * self.per_row[name].double()[..., None]


def places(case: CacheCase, x: CacheInputs, b: int) -> list:
    """Where the keys of sequence b are, new ones included."""
    table, rows = x.extra.get("block_table"), x.extra.get("cache_batch_idx")
    length = case.cache_seqlens[b]
    count = length + case.new if length >= 0 else 0
    return [cache_slot(b, n, table, rows, x.k_cache.shape[1]) for n in range(count)]


def make_codes(case: CacheCase, kind: str, device) -> CodedInputs:
    plain = make_cache(case, device)
    gen = torch.Generator().manual_seed(7)
    shape = plain.k_cache.shape[:3]
    descales, per_row, caches = {}, {}, {}
    for name in "kv":
        given, rows = _descales(case, plain, kind, shape, gen)
        descales[f"{name}_descale"], per_row[name] = given, rows.to(device)
        cache = getattr(plain, f"{name}_cache")
        caches[name] = poisoned(nearest(cache.float() / per_row[name][..., None]), fill=7.0)
    coded = CacheInputs(plain.q, caches["k"], caches["v"], plain.k, plain.v, plain.extra)
    return CodedInputs(plain, coded, descales, per_row)


def _descales(case: CacheCase, x: CacheInputs, kind: str, shape, gen) -> tuple:
    """One argument, and its number at each row of the cache, (pages or batch, rows, hk)."""
    device, nan = x.q.device, float("nan")
    if kind == "none":
        return None, torch.ones(shape)
    if kind == "number":
        number = 0.037
        return number, torch.full(shape, number)
    rows = torch.full(shape, nan)
    of_heads = torch.rand(case.hk, case.b, generator=gen).t() * 0.05 + 0.01
    for b in range(case.b):
        for place in places(case, x, b):
            if place is not None:
                one = torch.rand(case.hk, generator=gen) * 0.05 + 0.01
                rows[place] = of_heads[b] if kind == "head" else one
    if kind == "head":
        return of_heads.to(device), rows
    return poisoned(rows.to(device)), rows
