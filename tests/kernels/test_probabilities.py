"""The kernel that fills S_dmask, on the host, after a forward kernel that gives it the LSE."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP16, OFFSET, SEED, Case, make_inputs, rng_state
from compare import assert_accurate
from reference import attention_ref, standard_attention
from reference_dropout import keep_mask

from . import calls

VARIANTS = {BF16: "fwd_sm80_bf16_d64_full", FP16: "fwd_sm80_fp16_d64_full"}
SPARE = 8  # entries behind S_dmask


def s_dmask_of(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """S_dmask, contiguous and NaN, and what lies behind it."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + SPARE,), float("nan"), dtype=dtype)
    return buffer[:size].view(shape), buffer[size:]


@pytest.mark.parametrize(
    "case",
    [
        Case(BF16, sq=70, sk=131, h=3, hk=1),
        Case(FP16, sq=70, sk=300, h=2, hk=2, d=40, dv=64, causal=True),
        Case(BF16, sq=90, sk=33, window=(7, 2), sinks=True, scale=-0.1),
        Case(FP16, sq=33, sk=90, causal=True, softcap=3.0, alibi="bh", dropout_p=0.3),
        Case(BF16, sq=20, sk=40, alibi="h", dropout_p=0.7, layout="transposed"),
        Case(BF16, sq=3, sk=0),
    ],
    ids=str,
)
def test_dense(kernels, case):
    x = make_inputs(case)
    shape = (case.b, case.h, case.sq, case.sk)
    s_dmask, behind = s_dmask_of(*shape, dtype=case.dtype)
    kwargs = case.mask_kwargs() | x.scores_kwargs() | {"softcap": case.softcap}
    kwargs |= {"softmax_scale": case.scale, "dropout_p": case.dropout_p}
    calls.dense(
        kernels, VARIANTS[case.dtype], x.q, x.k, x.v, s_dmask=s_dmask, rng_state=rng_state("cpu"),
        **kwargs,
    )  # fmt: skip
    kwargs["keep_mask"] = x.keep_mask
    _, _, expected = attention_ref(x.q, x.k, x.v, **kwargs)
    _, _, standard = standard_attention(x.q, x.k, x.v, **kwargs)
    assert_accurate("|S_dmask|", s_dmask.abs(), expected, standard)
    kept = torch.ones(shape, dtype=bool) if x.keep_mask is None else x.keep_mask
    assert torch.equal(~s_dmask.signbit(), kept)
    assert behind.isnan().all()


def test_varlen(kernels):
    """Empty sequences, used lengths, left padding: zeros where a sequence has no entry."""
    gen = torch.Generator().manual_seed(1)
    lengths_q, used, leftpad, allocated = [0, 50, 3, 20], [10, 66, 133, 0], [0, 3, 50, 0], 140
    cu_q = torch.tensor([0, *lengths_q]).cumsum(0).int()
    cu_k = torch.arange(5, dtype=torch.int32) * allocated
    heads, dropout_p = 2, 0.4
    q = torch.randn(80, heads, 64, generator=gen).to(BF16)
    k, v = torch.randn(2, 4 * allocated, 1, 64, generator=gen).to(BF16)
    s_dmask, behind = s_dmask_of(4, heads, max(lengths_q), allocated, dtype=BF16)
    calls.varlen(
        kernels, VARIANTS[BF16], q, k, v, cu_q, cu_k, seqused_k=torch.tensor(used).int(),
        leftpad_k=torch.tensor(leftpad).int(), causal=True, s_dmask=s_dmask,
        dropout_p=dropout_p, rng_state=rng_state("cpu"),
    )  # fmt: skip
    kept = keep_mask(SEED, OFFSET, 4, heads, max(lengths_q), allocated, dropout_p)
    for b, (rows, n, pad) in enumerate(zip(lengths_q, used, leftpad, strict=True)):
        seqlen_k = max(n - pad, 0)
        own_q, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b] + pad, cu_k[b] + pad + seqlen_k)
        inputs = q[None, own_q], k[None, keys], v[None, keys]
        _, _, expected = attention_ref(*inputs, causal=True)
        _, _, standard = standard_attention(*inputs, causal=True)
        mine = s_dmask[b, None, :, :rows, :seqlen_k]
        assert_accurate(f"|S_dmask| of sequence {b}", mine.abs(), expected, standard)
        assert torch.equal(~mine.signbit(), kept[b, None, :, :rows, :seqlen_k])
        rest = s_dmask[b].clone()
        rest[:, :rows, :seqlen_k] = 0
        assert not rest.any()
    assert behind.isnan().all()
