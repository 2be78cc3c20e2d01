"""``only_qv`` of SGLang and vLLM: scores of the latent part alone, of a model that rotates none."""

from __future__ import annotations

import pytest
import torch
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, standard_attention
from torch import Tensor

import flash_attn_interface as fa3

BF16 = torch.bfloat16
B, ROOM, H, D, DV = 3, 40, 4, 64, 512
USED = [37, 1, 20]
ENDS, LONGEST = [0, 1, 4, 6], 3


def randn(device, *shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16).to(device)


def int32(device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def pages(device) -> tuple[Tensor, Tensor]:
    """Latent rows of B sequences in pages of 10, and the table that has them in another order."""
    order = torch.randperm(B * ROOM // 10, dtype=torch.int32)
    return randn(device, len(order), 10, 1, DV), order.view(B, -1).to(device)


def check(out: Tensor, lse: Tensor, qv: Tensor, v: Tensor, **options) -> None:
    """Of one sequence: out (rows, H, DV), lse (H, rows), latent rows (keys, 1, DV)."""
    x = qv[None], v[None], v[None]
    ref, ref_lse, _ = attention_ref(*x, **options)
    standard, _, _ = standard_attention(*x, **options)
    assert_accurate("out", out, ref[0], standard[0])
    assert_lse("lse", lse.contiguous(), ref_lse[0])


def check_packed(out: Tensor, lse: Tensor, qv: Tensor, v: Tensor, table: Tensor) -> None:
    for b, used in enumerate(USED):
        rows = slice(ENDS[b], ENDS[b + 1])
        keys = v[table[b].long()].flatten(0, 1)[:used]
        check(out[rows], lse[:, rows], qv[rows], keys, causal=True)


def test_rows_of_a_cache(device):
    """Without the other queries and keys, as SGLang calls it."""
    qv, v = randn(device, B, 2, H, DV), randn(device, B, ROOM, 1, DV)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        None, None, v, qv=qv, only_qv=True, cache_seqlens=int32(device, *USED), causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    for b, used in enumerate(USED):
        check(out[b], lse[b], qv[b], v[b, :used], causal=True)


def test_pages(device):
    """Beside queries and keys that hold anything, as vLLM calls it."""
    qv, (v, table) = randn(device, ENDS[-1], H, DV), pages(device)
    unset = float("nan")
    out, lse = fa3.flash_attn_with_kvcache(
        torch.full((ENDS[-1], H, D), unset, dtype=BF16, device=device),
        torch.full((*v.shape[:-1], D), unset, dtype=BF16, device=device),
        v, qv=qv, only_qv=True, page_table=table, cache_seqlens=int32(device, *USED),
        cu_seqlens_q=int32(device, *ENDS), max_seqlen_q=LONGEST, attention_chunk=None,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    check_packed(out, lse, qv, v, table)


def test_packed_rows(device):
    qv, (v, table) = randn(device, ENDS[-1], H, DV), pages(device)
    out, lse = fa3.flash_attn_varlen_func(
        None, None, v, int32(device, *ENDS), None, LONGEST, ROOM, seqused_k=int32(device, *USED),
        page_table=table, qv=qv, only_qv=True, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    check_packed(out, lse, qv, v, table)


@pytest.mark.parametrize("unset", [False, None])
def test_unset_it_changes_nothing(unset):
    q, qv = randn("cpu", B, 1, H, D), randn("cpu", B, 1, H, DV)
    cache = randn("cpu", B, ROOM, 1, D), randn("cpu", B, ROOM, 1, DV)
    expected = fa3.flash_attn_with_kvcache(q, *cache, qv=qv)
    assert_bitwise("out", fa3.flash_attn_with_kvcache(q, *cache, qv=qv, only_qv=unset), expected)
    alone = fa3.flash_attn_with_kvcache(q, *cache, qv=qv, only_qv=True)
    assert not torch.equal(alone, expected)


BAD = {
    "without_qv": ({"qv": None}, ValueError, "only_qv: got True without a qv"),
    "number": ({"only_qv": 1}, TypeError, "only_qv: got "),
    "new_keys": ({"k": randn("cpu", B, 1, 1, D)}, ValueError, "k: got .* which takes no new keys"),
    "new_values": ({"v": randn("cpu", B, 1, 1, DV)}, ValueError, "v: got .* latent rows to v_cach"),
    "qv": ({"qv": 3}, TypeError, "qv: got int"),
    "columns": ({"qv": randn("cpu", B, 1, H, D)}, ValueError, "qv: got shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    changes, error, said = BAD[name]
    call = {"qv": randn("cpu", B, 1, H, DV), "only_qv": True} | changes
    with pytest.raises(error, match=f"^{said}"):
        fa3.flash_attn_with_kvcache(None, None, randn("cpu", B, ROOM, 1, DV), **call)


def test_rows_that_are_no_cache_are_refused():
    ends = int32("cpu", *ENDS)
    with pytest.raises(NotImplementedError, match=r"^qv: got .* without page_table"):
        fa3.flash_attn_varlen_func(
            None, None, randn("cpu", ENDS[-1], 1, DV), ends, ends, LONGEST, LONGEST,
            qv=randn("cpu", ENDS[-1], H, DV), only_qv=True,
        )  # fmt: skip
