"""``batch_invariant`` under FA3's names: the bits of a row are the same alone and in a batch."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import pytest
import torch
from compare import assert_bitwise
from torch import Tensor

import flash_attn_interface as fa3

HEADS, HEADS_K, HEAD_DIM = 8, 1, 32
ROWS, KEYS = [1, 20, 3], [100, 40, 700]
OPTIONS = {"batch_invariant": True}


def tensors(device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(shape).bfloat16().to(device) for shape in shapes]


def ints(device: str, values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ends(device: str, lengths: list[int]) -> Tensor:
    return ints(device, [0, *accumulate(lengths)])


@pytest.mark.parametrize("packed", [False, True])
def test_dense(packed, device):
    """In one tensor, where heads share tiles, and in three, where keys are split."""
    shape = (5, 33 if packed else 1, 4, HEAD_DIM)
    q, k, v = tensors(device, shape, *2 * [shape if packed else (5, 1100, 1, HEAD_DIM)])

    def run(part: slice) -> tuple[Tensor, Tensor]:
        parts = [x[part] for x in (q, k, v)]
        if packed:
            qkv = torch.stack(parts, 2)
            return fa3.flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **OPTIONS)
        return fa3.flash_attn_func(*parts, return_attn_probs=True, **OPTIONS)

    whole = run(slice(None))
    for b in (0, 4):
        part = slice(b, b + 1)
        for name, alone, all_of_it in zip(("out", "lse"), run(part), whole):
            assert_bitwise(f"{name}[{b}]", alone, all_of_it[part])


@pytest.mark.parametrize("chunk", [0, 32])
@pytest.mark.parametrize("used", [False, True])
def test_packed(used, chunk, device):
    """All rows of a sequence, and some of them."""
    q, *kv = tensors(device, (sum(ROWS), HEADS, HEAD_DIM), *2 * [(sum(KEYS), HEADS_K, HEAD_DIM)])

    def run(sequences: list[int]) -> list[Tensor]:
        rows, keys = ([lengths[b] for b in sequences] for lengths in (ROWS, KEYS))
        all_of_it = q.split(ROWS), *(x.split(KEYS) for x in kv)
        x = [torch.cat([parts[b] for b in sequences]) for parts in all_of_it]
        in_use = {"seqused_q": ints(device, [-(-n // 2) for n in rows])} if used else {}
        out = fa3.flash_attn_varlen_func(
            *x, ends(device, rows), ends(device, keys), max(rows), max(keys),
            attention_chunk=chunk, **in_use, **OPTIONS,
        )  # fmt: skip
        return list(out.split(rows))

    same_alone(run)


def same_alone(run) -> None:
    whole = run([0, 1, 2])
    for sequences in ([0], [1], [2], [0, 2]):
        for b, alone in zip(sequences, run(sequences), strict=True):
            assert_bitwise(f"sequence {b} of {sequences}", alone, whole[b])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("by", ["dense", "packed"])
def test_a_cache(by, rows, paged, device):
    """With new keys; dense and packed queries."""
    q, k, v = tensors(device, (3, rows, HEADS, HEAD_DIM), *2 * [(3, rows, HEADS_K, HEAD_DIM)])
    caches = tensors(device, *2 * [(3, 768, HEADS_K, HEAD_DIM)])

    def run(sequences: list[int]) -> list[Tensor]:
        count = len(sequences)
        held = [x[sequences] for x in caches]
        more = {"cache_seqlens": ints(device, [KEYS[b] for b in sequences])}
        if paged:
            held = [x.view(count * 48, 16, HEADS_K, HEAD_DIM) for x in held]
            more["page_table"] = ints(device, range(count * 48)).view(count, 48)
        queries = q[sequences]
        if by == "packed":
            queries = queries.flatten(0, 1)
            more |= {"cu_seqlens_q": ends(device, [rows] * count), "max_seqlen_q": rows}
        out = fa3.flash_attn_with_kvcache(
            queries, *held, k[sequences], v[sequences], return_softmax_lse=True, **more, **OPTIONS
        )[0]
        return list(out.view(count, rows, HEADS, HEAD_DIM))

    same_alone(run)


def test_a_cache_has_the_same_result(device):
    """Though its rows are taken as pages."""
    q, k, v = tensors(device, (3, 2, HEADS, HEAD_DIM), *2 * [(3, 2, HEADS_K, HEAD_DIM)])
    caches = tensors(device, *2 * [(3, 60, HEADS_K, HEAD_DIM)])
    cos, sin = (x.float() for x in tensors(device, *2 * [(60, 8)]))
    results = []
    for invariant in (False, True):
        held = [x.clone() for x in caches]
        out, lse = fa3.flash_attn_with_kvcache(
            q, *held, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=ints(device, [50, 0, 7]),
            cache_batch_idx=ints(device, [2, 0, 1]), cache_leftpad=ints(device, [3, 0, 0]),
            causal=True, return_softmax_lse=True, batch_invariant=invariant,
        )  # fmt: skip
        results.append((out, lse, *held))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_it_is_a_flag():
    """Said before anything is written."""
    q, k, v = tensors("cpu", *[(1, 4, 2, 16)] * 3)
    for function in (fa3.flash_attn_func, fa3.flash_attn_with_kvcache):
        with pytest.raises(TypeError, match="batch_invariant: got 1"):
            function(q, k, v, batch_invariant=1)


def test_chunks_that_begin_within_a_page():
    """Which kernels serve them would depend on the longest sequence."""
    q, k, v = tensors("cpu", (4, 2, 32), *2 * [(6, 16, 1, 32)])
    table = ints("cpu", [[0, 1, 2, 3, 4, 5]])
    call = partial(
        fa3.flash_attn_varlen_func, q, k, v, ends("cpu", [4]), ends("cpu", [90]), 4, 96,
        page_table=table, batch_invariant=True,
    )  # fmt: skip
    call(attention_chunk=32)
    with pytest.raises(NotImplementedError, match=r"^attention_chunk: got 40 with batch_invariant"):
        call(attention_chunk=40)
