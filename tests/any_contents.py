"""Random contents of index tensors, right and wrong ones: kernels must stay inside whatever they
read, because on a GPU they were not checked before."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

import flash_attn
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
from flash_attn.layers.rotary import apply_rotary_emb

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


def any_int(rng: random.Random, most: int) -> int:
    """Within [0, most], about there, or far from it."""
    return rng.choice(
        [
            rng.randint(0, most),
            rng.randint(-3, most + 3),
            rng.choice([INT_MIN, INT_MIN + 1, -1, 0, most, most + 1, INT_MAX - 1, INT_MAX]),
        ]
    )


def any_offsets(rng: random.Random, total: int, batch: int) -> list[int]:
    """A cu_seqlens of batch + 1 entries: right, right but for one, or of a longer batch, or not."""
    ascending = sorted(rng.randint(0, total) for _ in range(batch + 1))
    from_zero = [0, *ascending[1:]]
    wrong = list(rng.choice([ascending, from_zero]))
    wrong[rng.randrange(batch + 1)] = any_int(rng, total)
    return rng.choice(
        [
            ascending,
            from_zero,
            wrong,
            ascending[::-1],
            [any_int(rng, total)] * (batch + 1),
            [any_int(rng, total) for _ in range(batch + 1)],
        ]
    )


def any_mask(rng: random.Random) -> dict:
    return rng.choice([{}, {"causal": True}, {"window_size": (rng.randint(0, 90), 5)}])


def int32(values: list[int] | list[list[int]], device="cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(rng: random.Random, total: int, batch: int, device="cpu") -> Tensor:
    return int32(any_offsets(rng, total, batch), device)


def numbers(rng: random.Random, most: int, *shape: int, device="cpu") -> Tensor:
    """int32 of one or two dimensions."""
    if len(shape) == 2:
        rows = [[any_int(rng, most) for _ in range(shape[1])] for _ in range(shape[0])]
        return int32(rows, device).reshape(shape)
    return int32([any_int(rng, most) for _ in range(shape[0])], device)


# ---- calls that have nothing right but their shapes ---------------------------------------------

# What lies around a tensor, and must lie there after a call. NaN: what is read there shows, too.
GUARD = float("nan")


def surrounded(x: Tensor) -> Tensor:
    """The same values inside of a larger tensor."""
    shape = [*(n + 2 for n in x.shape[:-1]), x.shape[-1] + 16]
    around = torch.full(shape, GUARD, dtype=x.dtype, device=x.device)
    rows = (slice(1, n + 1) for n in x.shape[:-1])
    return around[(*rows, slice(8, -8))].copy_(x)


def check_surroundings(*tensors: Tensor) -> None:
    for x in tensors:
        x.fill_(GUARD)
        assert x._base.isnan().all(), "written around a tensor"


class Calls:
    """Of one dtype and head dims, on one device. Each returns what it has allocated.

    expect: called with the (shape, dtype) of what a call is going to allocate.
    """

    def __init__(self, rng: random.Random, dtype, head_dim: int, head_dim_v: int, device: str,
                 expect: Callable[..., None] = lambda *like: None):  # fmt: skip
        self.rng, self.dtype, self.device, self.expect = rng, dtype, device, expect
        self.head_dim, self.head_dim_v = head_dim, head_dim_v
        self.heads_k = rng.choice([1, 2])
        self.heads = self.heads_k * rng.choice([1, 2, 8])

    def randn(self, *shape: int) -> Tensor:
        return surrounded(torch.randn(shape, dtype=self.dtype, device=self.device))

    def numbers(self, most: int, *shape: int) -> Tensor:
        return numbers(self.rng, most, *shape, device=self.device)

    def packed(self) -> tuple:
        """q, cu_seqlens_q, cu_seqlens_k, batch, what is said of lengths, total_k"""
        rng = self.rng
        batch, total_q, total_k = rng.randint(1, 40), rng.randint(1, 500), rng.randint(1, 500)
        q = self.randn(total_q, self.heads, self.head_dim)
        cu = [offsets(rng, total, batch, self.device) for total in (total_q, total_k)]
        said = [rng.choice([0, 40, 600]) for _ in cu]
        return q, *cu, batch, said, total_k

    def expect_outputs(self, q: Tensor) -> None:
        """At last, or what else is allocated would take the place."""
        out_shape = (*q.shape[:-1], self.head_dim_v)
        self.expect((out_shape, self.dtype), (out_shape[:-1], torch.float32))

    def options(self) -> tuple:
        mask = any_mask(self.rng)
        return mask.get("causal", False), *mask.get("window_size", (-1, -1))

    def optional(self, most: int, *shape: int) -> Tensor | None:
        return self.numbers(most, *shape) if self.rng.random() < 0.5 else None

    def forward(self) -> list[Tensor]:
        q, cu_q, cu_k, batch, said, total_k = self.packed()
        k, v = (self.randn(total_k, self.heads_k, d) for d in (self.head_dim, self.head_dim_v))
        lengths = {name: self.optional(total_k, batch) for name in ("seqused_k", "leftpad_k")}
        self.expect_outputs(q)
        out, lse, *_ = _flash_attn_varlen_forward(
            q, k, v, cu_q, cu_k, *said, 0.0, 0.1, *self.options(), **lengths
        )
        check_surroundings(q, k, v)
        return [out, lse]

    def pages(self) -> list[Tensor]:
        q, cu_q, cu_k, batch, said, _ = self.packed()
        count, size, listed = 12, self.rng.choice([1, 3, 16]), self.rng.randint(0, 9)
        k, v = (self.randn(count, size, self.heads_k, d) for d in (self.head_dim, self.head_dim_v))
        lengths = {name: self.optional(listed * size, batch) for name in ("seqused_k", "leftpad_k")}
        table = self.numbers(count - 1, batch, listed)
        self.expect_outputs(q)
        out, lse, *_ = _flash_attn_varlen_forward(
            q, k, v, cu_q, cu_k, *said, 0.0, 0.1, *self.options(), block_table=table, **lengths
        )
        check_surroundings(q, k, v)
        return [out, lse]

    def backward(self) -> list[Tensor]:
        q, cu_q, cu_k, batch, said, total_k = self.packed()
        k, v = (self.randn(total_k, self.heads_k, d) for d in (self.head_dim, self.head_dim_v))
        dout = self.randn(len(q), self.heads, self.head_dim_v)
        lse = torch.randn(self.heads, len(q), device=self.device)
        gradients = [self.randn(*x.shape) for x in (q, k, v)]
        causal, *window = self.options()
        used = self.optional(total_k, batch)
        self.expect_outputs(q)
        softmax_d = _flash_attn_varlen_backward(
            dout, q, k, v, dout, lse, *gradients, cu_q, cu_k, *said, 0.0, 0.1, causal, *window, 0.0,
            None, self.rng.random() < 0.5, seqused_k=used,
        )  # fmt: skip
        check_surroundings(q, k, v, dout, *gradients)
        return [softmax_d]

    def cache(self) -> list[Tensor]:
        rng = self.rng
        batch, seqlen_q = rng.randint(1, 9), rng.choice([1, 3, 90])
        entries, room = rng.randint(1, 9), rng.choice([1, 16, 300])
        where, most = {}, room
        if rng.random() < 0.5:
            most = room * rng.randint(1, 7)
            where["block_table"] = self.numbers(entries - 1, batch, most // room)
        else:
            where["cache_batch_idx"] = self.numbers(entries - 1, batch)
        new = rng.randint(1, min(4, most))
        q, k, v, k_cache, v_cache = (
            self.randn(*shape, d)
            for shape, d in (
                ((batch, seqlen_q, self.heads), self.head_dim),
                ((batch, new, self.heads_k), self.head_dim),
                ((batch, new, self.heads_k), self.head_dim_v),
                ((entries, room, self.heads_k), self.head_dim),
                ((entries, room, self.heads_k), self.head_dim_v),
            )
        )
        positions = rng.choice([most + new, most + 100])
        cos, sin = (self.randn(positions, self.head_dim // 4) for _ in range(2))
        used, leftpad = self.numbers(most, batch), self.optional(most, batch)
        self.expect_outputs(q)
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, used, cache_leftpad=leftpad,
            num_splits=rng.choice([0, 1, 3]), rotary_interleaved=rng.random() < 0.5,
            return_softmax_lse=True, **where, **any_mask(rng),
        )  # fmt: skip
        check_surroundings(q, k, v, k_cache, v_cache, cos, sin)
        return [out, lse]

    def rotary(self) -> list[Tensor]:
        rng = self.rng
        q, cu, _, batch, _, _ = self.packed()
        positions, turning = rng.choice([1, 40, 600]), rng.choice([2, 4])
        cos, sin = (self.randn(positions, self.head_dim // turning) for _ in range(2))
        first = rng.choice([self.numbers(positions, batch), rng.choice([0, positions, INT_MAX])])
        self.expect((q.shape, self.dtype))
        out = apply_rotary_emb(q, cos, sin, rng.random() < 0.5, False, first, cu)
        check_surroundings(q, cos, sin)
        return [out]

    ALL = (forward, pages, backward, cache, rotary)
