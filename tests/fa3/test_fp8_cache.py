"""Caches of 8-bit codes under FA3's names; queries, new keys and chunks as packed rows."""

from __future__ import annotations

import pytest
import torch
from cache_cases import CacheCase, run_cached
from compare import assert_bitwise
from fp8_cases import KINDS, bits, make_codes

import flash_attn
import flash_attn_interface as fa3

CASES = [
    CacheCase("dense", new=3, sq=3, rotary_dim=64),
    CacheCase("rows", new=2, sq=2, batch_idx=True, leftpad=(30, 5, 0)),
    CacheCase("pages", new=3, sq=3, page_size=16),
    CacheCase("absent", new=2, sq=2, cache_seqlens=(-1, 20, 0), page_size=16),
]


def ends(device, n: int) -> torch.Tensor:
    return torch.arange(4, dtype=torch.int32, device=device) * n


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_as_flash_attn(case, kind, packed, device):
    """The same results and codes, also where rows and new keys are packed."""
    x, same = (make_codes(case, kind, device) for _ in range(2))
    expected, lse = run_cached(case, same.coded, **same.descales)
    y = x.coded
    extra = {name.replace("block", "page"): given for name, given in y.extra.items()}
    q, k, v, lengths = y.q, y.k, y.v, torch.tensor(case.cache_seqlens, device=device).int()
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        extra |= {"cu_seqlens_q": ends(device, case.sq), "cu_seqlens_k_new": ends(device, case.new)}
    out, our_lse = fa3.flash_attn_with_kvcache(
        q, y.k_cache, y.v_cache, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True,
        **extra, **x.descales,
    )  # fmt: skip
    if packed:
        out, our_lse = out.unflatten(0, y.q.shape[:2]), our_lse.unflatten(1, y.q.shape[:2])
        our_lse = our_lse.transpose(0, 1)
    for name in ("k_cache", "v_cache"):
        # Packed rows are turned by another operation, which may round otherwise.
        if not (packed and case.rotary_dim):
            ours, theirs = (getattr(z.coded, name) for z in (x, same))
            assert_bitwise(name, bits(ours), bits(theirs))
    loose = 0.1 if packed and case.rotary_dim else 1e-2
    torch.testing.assert_close(out, expected, atol=loose, rtol=loose)
    torch.testing.assert_close(our_lse, lse, atol=loose, rtol=loose)


@pytest.mark.parametrize("kind", ["head", "row"])
@pytest.mark.parametrize("form", ["step", "packed", "varlen"])
def test_chunks(kind, form, device):
    """A chunk is a sequence of its own, whose descales are those of the whole."""
    case = CacheCase("chunks", page_size=16, sq=9, cache_seqlens=(40, 128, 33))
    x = make_codes(case, kind, device)
    y, table = x.coded, x.coded.extra["block_table"]
    used = torch.tensor(case.cache_seqlens, device=device).int()
    options = {"causal": True, "attention_chunk": 32, **x.descales}
    numbers = [x.numbers(name).to(case.dtype) for name in "kv"]
    if form == "step":

        def call(k, v, **options):
            return fa3.flash_attn_with_kvcache(
                y.q[:, :1], k, v, cache_seqlens=used, page_table=table, **options
            )

    elif form == "packed":

        def call(k, v, **options):
            return fa3.flash_attn_with_kvcache(
                y.q, k, v, cache_seqlens=used, page_table=table, **options
            )

    else:

        def call(k, v, **options):
            return fa3.flash_attn_varlen_func(
                y.q.flatten(0, 1), k, v, ends(device, 9), None, 9, 128, seqused_k=used,
                seqused_q=torch.tensor([9, 4, 0], device=device).int(), page_table=table, **options,
            )  # fmt: skip

    ours = call(y.k_cache, y.v_cache, **options)
    plain = call(*numbers, causal=True, attention_chunk=32)
    torch.testing.assert_close(ours, plain, atol=2e-2, rtol=2e-2)
    without = call(y.k_cache, y.v_cache, **options | {"attention_chunk": 0})
    assert not torch.allclose(ours, without, atol=2e-2)  # chunks hide something here


def test_the_operator(device):
    case = CacheCase("operator", sq=2)
    x = make_codes(case, "head", device)
    used = torch.tensor(case.cache_seqlens, device=device).int()
    out, *_ = torch.ops.flash_attn_3.fwd(
        x.coded.q, x.coded.k_cache, x.coded.v_cache, seqused_k=used, is_causal=True, **x.descales
    )
    same = flash_attn.flash_attn_with_kvcache(
        x.coded.q, x.coded.k_cache, x.coded.v_cache, cache_seqlens=used, causal=True, **x.descales
    )
    assert_bitwise("out", out, same)


def test_descales_of_another_shape(device):
    case = CacheCase("shape", page_size=16, sq=2)
    x = make_codes(case, "none", device)
    used = torch.tensor(case.cache_seqlens, device=device).int()
    with pytest.raises(ValueError, match=r"k_descale: got shape \(2, 2\); .* = \(3, 2\)"):
        fa3.flash_attn_with_kvcache(
            x.coded.q.flatten(0, 1), x.coded.k_cache, x.coded.v_cache, cache_seqlens=used,
            cu_seqlens_q=ends(device, 2), page_table=x.coded.extra["block_table"],
            k_descale=torch.ones(2, 2, device=device),
        )  # fmt: skip
