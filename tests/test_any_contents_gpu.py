"""Index tensors on a GPU, whose contents are not checked: nothing is written around an output, and
every call ends."""

from __future__ import annotations

import math
import random

import pytest
import torch
from any_contents import Calls, any_mask, int32
from cases import BF16, FP16
from compare import assert_accurate, assert_lse
from reference import attention_ref, gradients, standard_attention, varlen_ref
from torch import Tensor

from flash_attn import flash_attn_varlen_func

HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)]
MIB = 1 << 20
GUARD_WORD = 0x7FC17FC1  # NaN as bf16 and as float32


def rest_is_free(first: Tensor) -> bool:
    """Whether a block is the first of its segment, and all behind it is free."""
    return any(
        segment["address"] == first.data_ptr() and len(segment["blocks"]) == 2
        for segment in torch.cuda.memory_snapshot()
    )


class Holes:
    """Free memory between guards, of the sizes that a call is about to allocate.

    The allocator gives out the smallest free block that is large enough: these, unless one of the
    same size is free elsewhere.
    """

    def __init__(self) -> None:
        self.guards: list[Tensor] = []
        self.kept: list[Tensor] = []  # where else the call might find room
        self.places: list[range] = []
        self.made = self.filled = 0

    def make(self, *like: tuple[tuple[int, ...], torch.dtype]) -> None:
        self.guards, self.places, self.kept = [], [], []
        torch.cuda.empty_cache()  # so that little has to be filled
        holes = []  # until all are made, or one would be where another was
        for shape, dtype in like:
            size = math.prod(shape) * dtype.itemsize
            if size == 0:
                continue
            before, hole, behind = self._surrounded(size)
            self.guards += [before, behind]
            holes.append(hole)
            self.places.append(range(hole.data_ptr(), hole.data_ptr() + hole.nbytes))

    def _surrounded(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Guard, hole and guard, which fill one of the allocator's segments."""
        segment = (2 if size <= MIB else 20) * MIB  # small and large blocks lie apart
        taken = -(-size // 512) * 512
        length = (segment - taken) // 1024 * 512

        def block(length: int) -> Tensor:
            return torch.empty(length, dtype=torch.uint8, device="cuda")

        def guard(length: int) -> Tensor:
            return block(length).view(torch.int32).fill_(GUARD_WORD)

        while not rest_is_free(before := guard(length)):
            self.kept.append(before)
        # A smaller free block, or another of this size, would be taken first, now and by the call.
        # They are filled, from large to small, until there are none.
        hole = None
        for filling in [*(n for n in (MIB >> i for i in range(12)) if n > size), size]:
            del hole
            while (hole := block(filling)).data_ptr() != before.data_ptr() + length:
                self.kept.append(hole)
                assert len(self.kept) < 10_000, "no free block holds all three"
        behind = guard(segment - taken - length)
        assert behind.data_ptr() == hole.data_ptr() + taken
        return before, hole, behind

    def check(self, outputs: list[Tensor]) -> None:
        torch.cuda.synchronize()
        for guard in self.guards:
            assert bool((guard == GUARD_WORD).all()), "written around an output"
        self.made += len(outputs)
        self.filled += sum(x.data_ptr() in place for x in outputs for place in self.places)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("call", Calls.ALL, ids=lambda call: call.__name__)
def test_nothing_is_written_outside(cuda, call, dims):
    holes = Holes()
    for seed in range(150):
        torch.manual_seed(seed)
        dtype = (BF16, FP16)[seed % 2]
        calls = Calls(random.Random(seed), dtype, *dims, cuda, expect=holes.make)
        holes.check(call(calls))
    assert holes.filled > 0.5 * holes.made


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("longest", [30, 400])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sequences_from_the_middle_of_a_packed_batch(cuda, dims, longest, deterministic):
    """With the whole tensors: other rows become zeros, and so do their gradients."""
    rng = random.Random(longest)
    lengths = [longest, 300, 7, 0, longest - 20, 33, longest, 100]
    cu = int32([0, *lengths], cuda).cumsum(0, dtype=torch.int32)
    some, starts = cu[2:7], cu[2:7].tolist()
    q, k, v, dout = (
        torch.randn(sum(lengths), heads, d, dtype=BF16, device=cuda)
        for heads, d in ((4, dims[0]), (2, dims[0]), (2, dims[1]), (4, dims[1]))
    )
    inputs, mask = {"q": q, "k": k, "v": v}, any_mask(rng)

    def ours(q, k, v):
        return flash_attn_varlen_func(
            q, k, v, some, some, longest, longest, return_lse=True, deterministic=deterministic,
            **mask,
        )  # fmt: skip

    def written_out(attention):
        return lambda q, k, v: varlen_ref(attention, q, k, v, starts, starts, **mask)

    out, lse, grads = gradients(ours, inputs, dout)
    expected, expected_lse, wanted = gradients(
        written_out(attention_ref), inputs, dout, dtype=torch.float64
    )
    standard, _, bar = gradients(written_out(standard_attention), inputs, dout)
    assert_accurate("out", out, expected, standard)
    assert_lse("lse", lse, expected_lse)
    for name, gradient in grads.items():
        assert_accurate(f"d{name}", gradient, wanted[name], bar[name])
        assert not gradient[: starts[0]].any()
        assert not gradient[starts[-1] :].any()


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_a_window_wider_than_was_said_of_sequences(cuda, dims):
    """max_seqlen may be too small: the window counts all the same, whatever tile was planned."""
    q, k, v = (torch.randn(300, 2, d, dtype=BF16, device=cuda) for d in (dims[0], *dims))
    starts, mask = [0, 200, 300], {"window_size": (50, 30)}
    cu = int32(starts, cuda)
    wide = (x.double() for x in (q, k, v))
    expected, _ = varlen_ref(attention_ref, *wide, starts, starts, **mask)
    standard, _ = varlen_ref(standard_attention, q, k, v, starts, starts, **mask)
    for longest in (200, 20):
        out = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **mask)
        assert_accurate("out", out, expected, standard)
