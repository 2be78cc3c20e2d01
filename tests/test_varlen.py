"""Sequences of different lengths in one batch, forward and backward, packed, padded and paged."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
from calls import check_gradients
from cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    Case,
    build,
    padded_on_gpu,
    pairwise,
    poisoned,
)
from compare import assert_accurate, assert_bitwise, assert_lse, exponent_error
from packed_cases import LENGTHS, Packed, pack, run_packed, written_out
from reference import attention_ref, standard_attention
from torch import Tensor

from flash_attn import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.cpu import batches, varlen
from flash_attn.cpu.seqlens import Sequence
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward


def check_forward(case: Case, x: Packed, extra: dict | None = None, **lists) -> None:
    out, lse = run_packed(case, x, x.q, x.k, x.v, x.s_aux, **(extra or {}))
    ref_out, ref_lse = written_out(case, x, attention_ref, **lists)(x.q, x.k, x.v, x.s_aux)
    standard = written_out(case, x, standard_attention, **lists)
    std_out, _ = standard(x.q, x.k, x.v, x.s_aux)
    exponent = partial(exponent_error, out.dtype, ref_lse, ref_out)
    assert_accurate("out", out, ref_out, std_out, unavoidable=exponent)
    assert not out[x.cu_q[-1] :].any(), "rows past the last sequence are not 0"
    # The contract does not say what the LSE of rows of no sequence is.
    total = x.cu_q[-1]

    def std_lse():
        return standard(x.q.float(), x.k.float(), x.v.float(), x.s_aux)[1][:, :total]

    assert_lse("lse", lse[:, :total].contiguous(), ref_lse[:, :total], std_lse)


def check_backward(case: Case, x: Packed, extra: dict | None = None, **lists) -> None:
    inputs = {"q": x.q, "k": x.k, "v": x.v}
    if x.s_aux is not None:
        inputs["s_aux"] = x.s_aux
    total = x.cu_q[-1]

    def used(function):
        """Only rows of sequences are compared with `dout`, which is NaN beyond them."""

        def call(**leaves):
            out, lse = function(**leaves)
            return out[:total], lse[:, :total].contiguous()

        return call

    check_gradients(
        used(partial(run_packed, case, x, **(extra or {}))),
        used(written_out(case, x, attention_ref, **lists)),
        used(written_out(case, x, standard_attention, **lists)),
        inputs,
        x.dout[:total],
        torch.randn(case.h, total, device=x.device) if case.seed % 2 else None,
        case.dropout_p,
    )


MASKS = [(False, (-1, -1)), (True, (-1, -1)), (False, (10, 3)), (True, (30, -1))]

PLAIN = build(
    pairwise(
        seed=3,
        dtype=[BF16, FP16],
        h__hk=[(4, 4), (4, 1), (6, 2)],
        d=[64, 128, 40],
        causal__window=MASKS,
        kind=["normal", "outliers", "large"],
    )
)
FEATURES = build(
    pairwise(
        seed=4,
        dtype=[BF16, FP32, FP64],
        h__hk=[(4, 4), (4, 1), (6, 2)],
        d__dv=[(64, None), (128, None), (192, 128), (40, 72)],
        causal__window=MASKS,
        softcap=[0.0, 15.0],
        alibi=[None, "h", "bh"],
        dropout_p=[0.0, 0.17],
        sinks=[False, True],
        kind=["normal", "low_rank", "outliers", "constant"],
    )
)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("case", PLAIN[:6], ids=str)
def test_plain(case, lengths, device):
    check_forward(case, pack(case, LENGTHS[lengths], device))


@pytest.mark.parametrize("case", PLAIN[6:], ids=str)
def test_plain_random_lengths(case, device):
    check_forward(case, pack(case, random_lengths(case.seed), device))


def random_lengths(seed: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    batch = rng.randrange(1, 7)
    draw = partial(rng.choice, [0, 1, 7, 16, 17, 63, 64, 65, 100, 128, 129])
    return [draw() for _ in range(batch)], [draw() for _ in range(batch)]


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_features(case, device, needs):
    with needs(*case.features):
        check_forward(case, pack(case, random_lengths(case.seed), device))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("case", PLAIN[:4], ids=str)
def test_plain_gradients(case, lengths, device, needs):
    with needs("backward"):
        check_backward(case, pack(case, LENGTHS[lengths], device))


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_feature_gradients(case, device, needs):
    with needs("backward", *case.features):
        check_backward(case, pack(case, random_lengths(case.seed + 50), device))


def test_max_seqlen_as_a_tensor_or_too_large(device):
    case = Case(causal=True)
    x = pack(case, LENGTHS["mixed"], device)
    expected = run_packed(case, x, x.q, x.k, x.v)[0]
    lengths = x.lengths
    for q_max, k_max in [
        (torch.tensor(x.max_q), torch.tensor(x.max_k)),
        (x.max_q + 100, x.max_k + 1000),
        (torch.tensor(500, dtype=torch.int32), 500),
        (np.int64(x.max_q), np.int32(x.max_k)),
    ]:
        lengths.update(max_seqlen_q=q_max, max_seqlen_k=k_max)
        out = flash_attn_varlen_func(x.q, x.k, x.v, **lengths, causal=True)
        assert_bitwise("out", out, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_functions_equal_unpacked(causal, device, needs):
    lengths = LENGTHS["mixed"][0]
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    total, longest = sum(lengths), max(lengths)
    qkv = torch.randn(total, 3, 4, 64, device=device).to(BF16)
    q, k, v = qkv.unbind(1)
    run = partial(flash_attn_varlen_func, causal=causal, deterministic=True)
    expected = run(q, k, v, cu, cu, longest, longest)
    out = flash_attn_varlen_qkvpacked_func(qkv, cu, longest, causal=causal)
    assert_bitwise("qkvpacked", out, expected)
    kv = torch.stack([k, v], dim=1)
    out = flash_attn_varlen_kvpacked_func(q, kv, cu, cu, longest, longest, causal=causal)
    assert_bitwise("kvpacked", out, expected)
    dout = torch.randn_like(expected)
    with needs("backward"):
        three = [t.clone().requires_grad_() for t in (q, k, v)]
        run(*three, cu, cu, longest, longest).backward(dout)
        leaf = qkv.clone().requires_grad_()
        flash_attn_varlen_qkvpacked_func(
            leaf, cu, longest, causal=causal, deterministic=True
        ).backward(dout)
        assert_bitwise("dqkv", leaf.grad, torch.stack([t.grad for t in three], dim=1))
        leaf = kv.clone().requires_grad_()
        flash_attn_varlen_kvpacked_func(
            q, leaf, cu, cu, longest, longest, causal=causal, deterministic=True
        ).backward(dout)
        assert_bitwise("dkv", leaf.grad, torch.stack([t.grad for t in three[1:]], dim=1))


def with_unused_keys(case: Case, device) -> tuple[Packed, list[int]]:
    """Each key sequence owns more rows than it uses; the unused ones are NaN."""
    x = pack(case, ([20, 64, 9, 33], [40, 90, 70, 64]), device)
    used = [40, 61, 0, 1]
    for b, n in enumerate(used):
        x.k[x.cu_k[b] + n : x.cu_k[b + 1]] = float("nan")
        x.v[x.cu_k[b] + n : x.cu_k[b + 1]] = float("nan")
    return x, used


@pytest.mark.parametrize("window", [(-1, -1), (8, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_seqused_k(causal, window, device, needs):
    case = Case(causal=causal, window=window)
    x, used = with_unused_keys(case, device)
    seqused = torch.tensor(used, dtype=torch.int32, device=device)
    with needs("seqused_k"):
        check_forward(case, x, {"seqused_k": seqused}, seqused_k=used)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_seqused_k_gradients(dtype, device, needs):
    case = Case(dtype=dtype, causal=True)
    x, used = with_unused_keys(case, device)
    seqused = torch.tensor(used, dtype=torch.int32, device=device)
    with needs("backward", "seqused_k", *case.features):
        check_backward(case, x, {"seqused_k": seqused}, seqused_k=used)


@pytest.mark.parametrize("causal", [False, True])
def test_leftpad_k(causal, device, needs):
    case = Case(causal=causal)
    x = pack(case, ([20, 64, 9, 33], [40, 90, 70, 64]), device)
    leftpad = [0, 17, 70, 63]
    for b, n in enumerate(leftpad):
        x.k[x.cu_k[b] : x.cu_k[b] + n] = float("nan")
        x.v[x.cu_k[b] : x.cu_k[b] + n] = float("nan")
    tensor = torch.tensor(leftpad, dtype=torch.int32, device=device)
    with needs("leftpad"):
        check_forward(case, x, {"leftpad_k": tensor}, leftpad_k=leftpad)


def into_pages(x: Packed, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of k and of v in shuffled order, unused rows and pages NaN, and the block table."""
    counts = [-(-(b - a) // page_size) for a, b in zip(x.cu_k, x.cu_k[1:])]
    pages = sum(counts) + 3
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
    nan = float("nan")
    k = x.k.new_full((pages, page_size, *x.k.shape[1:]), nan)
    v = x.v.new_full((pages, page_size, *x.v.shape[1:]), nan)
    table = torch.full((len(counts), max(max(counts), 1) + 1), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        for n in range(count):
            page = table[b, n] = order.pop()
            begin = x.cu_k[b] + n * page_size
            end = min(begin + page_size, x.cu_k[b + 1])
            k[page, : end - begin] = x.k[begin:end]
            v[page, : end - begin] = x.v[begin:end]
    return poisoned(k), poisoned(v), table.to(x.device)


@pytest.mark.parametrize("lengths", ["keys_longer", "zeros"])
@pytest.mark.parametrize("page_size", [1, 16, 64, 100, 256])
def test_paged(page_size, lengths, device, needs):
    case = Case(causal=True)
    x = pack(case, LENGTHS[lengths], device)
    k, v, table = into_pages(x, page_size)
    with needs("paged"):
        out, lse = flash_attn_varlen_func(
            x.q, k, v, **x.lengths, causal=True, block_table=table, return_lse=True
        )
        ref_out, ref_lse = written_out(case, x, attention_ref)(x.q, x.k, x.v)
        std_out, _ = written_out(case, x, standard_attention)(x.q, x.k, x.v)
        assert_accurate("out", out, ref_out, std_out)
        total = x.cu_q[-1]
        assert_lse("lse", lse[:, :total].contiguous(), ref_lse[:, :total])


@pytest.mark.parametrize("lengths", ["one_each", "few", "beside_chunks"])
@pytest.mark.parametrize(("d", "dv"), [(60, 60), (36, 99), (250, 250)])
def test_pages_of_odd_rows(d, dv, lengths, device, needs):
    """No multiples of 16 bytes: read where they lie, or copied where many queries ask for them."""
    case = Case(d=d, dv=dv, causal=True)
    x = pack(case, FEW[lengths], device)
    k, v, table = into_pages(x, 16)
    with needs("paged", *case.features):
        out, lse = flash_attn_varlen_func(
            x.q, k, v, **x.lengths, causal=True, block_table=table, return_lse=True
        )
        ref, std = (
            written_out(case, x, f)(x.q, x.k, x.v) for f in (attention_ref, standard_attention)
        )
        assert_accurate("out", out, ref[0], std[0])
        total = x.cu_q[-1]
        assert_lse("lse", lse[:, :total].contiguous(), ref[1][:, :total])


# Sequences of few queries, alone and beside longer ones.
FEW = {
    "one_each": ([1] * 5, [100, 33, 0, 260, 7]),
    "few": ([1, 3, 0, 9, 2], [100, 33, 41, 260, 0]),
    "beside_chunks": ([1, 70, 0, 2, 129], [100, 80, 41, 260, 150]),
}
FEW_CASES = build(
    pairwise(
        seed=8,
        dtype=[BF16, FP16],
        h__hk=[(4, 4), (4, 1), (6, 2)],
        d=[64, 128, 40, 256],
        causal__window=MASKS,
        softcap=[0.0, 15.0],
        alibi=[None, "h", "bh"],
        sinks=[False, True],
    )
)


@pytest.mark.parametrize("lengths", FEW)
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_few_queries_in_pages(case, lengths, device, needs):
    """As engines call it: lengths from seqused_k, and nothing in cu_seqlens_k."""
    page_size, num_splits = ((1, 0), (16, 1), (16, 3), (256, 0))[case.seed % 4]
    x = pack(case, FEW[lengths], device)
    k, v, table = into_pages(x, page_size)
    used = torch.tensor(FEW[lengths][1], dtype=torch.int32, device=device)
    leftpad = [n // 3 for n in FEW[lengths][1]] if case.seed % 3 == 0 else None
    starts = None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32, device=device)
    with needs("paged", *case.features):
        out, lse, _, _ = _flash_attn_varlen_forward(
            *padded_on_gpu(x.q, k, v), x.lengths["cu_seqlens_q"], None, x.max_q, x.max_k, 0.0,
            case.d**-0.5, case.causal, *case.window, case.softcap, x.alibi_slopes,
            block_table=table, seqused_k=used, leftpad_k=starts, s_aux=x.s_aux,
            num_splits=num_splits,
        )  # fmt: skip
        ref, std = (
            written_out(case, x, attention, leftpad_k=leftpad)(x.q, x.k, x.v, x.s_aux)
            for attention in (attention_ref, standard_attention)
        )
        assert_accurate("out", out[..., : case.value_dim], ref[0], std[0])
        total = x.cu_q[-1]
        assert_lse("lse", lse[:, :total].contiguous(), ref[1][:, :total])


@pytest.mark.parametrize("lengths", [([1, 2, 0], [1100, 40, 5]), ([1], [1500])], ids=str)
def test_few_queries_and_long_keys(lengths, device, needs):
    case = Case(h=4, hk=2, causal=True)
    check_forward(case, pack(case, lengths, device))


@pytest.mark.parametrize("rows", [0, 3])
def test_batch_of_no_sequence(rows, device, needs):
    """Rows that belong to none see nothing."""
    q = torch.randn(rows, 4, 64, device=device).to(BF16).requires_grad_()
    cu = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = flash_attn_varlen_func(q, q, q, cu, cu, 0, 0, return_lse=True)
    assert out.shape == (rows, 4, 64)
    assert lse.shape == (4, rows)
    assert not out.any()
    with needs("backward"):
        out.sum().backward()
        assert not q.grad.any()


def test_equal_lengths_agree_with_the_dense_call(device):
    case = Case(b=3, sq=65, sk=97, causal=True)
    x = pack(case, ([65] * 3, [97] * 3), device, spare=0)
    out, _ = run_packed(case, x, x.q, x.k, x.v)
    dense = replace(case, layout="contiguous")
    q, k, v = (t.reshape(3, -1, *t.shape[1:]) for t in (x.q, x.k, x.v))
    ref, _, _ = attention_ref(q, k, v, **dense.mask_kwargs())
    std, _, _ = standard_attention(q, k, v, **dense.mask_kwargs())
    assert_accurate("out", out.reshape(ref.shape), ref, std)


# --- The CPU's batches of neighbours --------------------------------------------------------------


def sequences_of(lengths: list[int], gap_before: int | None = None) -> list[Sequence]:
    """Packed sequences of these lengths; keys have a gap before one of them."""
    seqs, row, key = [], 0, 0
    for index, length in enumerate(lengths):
        key += 3 if index == gap_before else 0
        seqs.append(Sequence(index, slice(row, row + length), slice(key, key + length)))
        row, key = row + length, key + length
    return seqs


@pytest.mark.parametrize(
    ("lengths", "gap_before", "members"),
    [
        ([4, 4, 4], None, [(0, 3)]),
        ([4, 4, 5, 5, 4], None, [(0, 2), (2, 4), (4, 5)]),
        ([0, 0, 4, 0], None, [(0, 2), (2, 3), (3, 4)]),
        ([4, 4, 4], 2, [(0, 2), (2, 3)]),
        ([], None, []),
    ],
)
def test_neighbours_of_one_length_are_a_batch(lengths, gap_before, members):
    seqs = sequences_of(lengths, gap_before)
    found = [(batch.members.start, batch.members.stop) for batch in batches.batches(seqs)]
    assert found == members
    apart = [batch.members for batch in batches.batches(seqs, together=False)]
    assert apart == [slice(i, i + 1) for i in range(len(lengths))]


@pytest.mark.parametrize("features", [{}, {"causal": True, "alibi": True}, {"dropout_p": 0.3}])
def test_a_batch_of_neighbours_is_its_sequences(features):
    """Forward and gradients of packed sequences, some of one length, against each by itself."""
    options = dict(features)
    slopes = torch.rand(7, 4) if options.pop("alibi", False) else None
    ends = torch.tensor([0, 8, 16, 24, 30, 30, 30, 38], dtype=torch.int32)
    inputs = [torch.randn(38, 4, 16, requires_grad=True) for _ in range(3)]

    def run(together: bool):
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            if not together:
                one_by_one = partial(batches.batches, together=False)
                patch.setattr(varlen, "batches", lambda seqs, together=True: one_by_one(seqs))
            out, lse = flash_attn_varlen_func(
                *inputs, ends, ends, 8, 8, alibi_slopes=slopes, return_lse=True, **options
            )
            return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), inputs)

    for ours, expected in zip(run(True), run(False)):
        torch.testing.assert_close(ours, expected)
