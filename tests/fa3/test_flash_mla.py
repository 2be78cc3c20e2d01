"""FlashMLA's names: the calls that programs make by them."""

from __future__ import annotations

import pytest
import torch
from compare import assert_accurate, assert_lse
from reference import attention_ref, standard_attention

import flash_mla

BF16 = torch.bfloat16
LENGTHS = [37, 1, 128]
PAGE = 64


def call(device, heads: int = 4, queries: int = 1, columns: int = 576):
    """q, latent pages, table, lengths."""
    gen = torch.Generator().manual_seed(heads)
    q = torch.randn(3, queries, heads, columns, generator=gen).to(BF16).to(device)
    pages = torch.randn(7, PAGE, 1, columns, generator=gen).to(BF16).to(device)
    table = torch.tensor([[4, -1], [0, 6], [2, 5]], dtype=torch.int32, device=device)
    return q, pages, table, torch.tensor(LENGTHS, dtype=torch.int32, device=device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "queries"), [(4, 1), (16, 1), (5, 2)])
def test_as_programs_call_it(heads, queries, causal, device, needs):
    q, pages, table, lengths = call(device, heads, queries)
    metadata, num_splits = flash_mla.get_mla_metadata(lengths, queries * heads, 1)
    with needs("paged", "kvcache"):
        out, lse = flash_mla.flash_mla_with_kvcache(
            q, pages, table, lengths, 512, metadata, num_splits, causal=causal
        )
    for b, length in enumerate(LENGTHS):
        keys = pages[table[b].clamp(min=0)].flatten(0, 1)[None, :length]
        x = q[b : b + 1], keys, keys[..., :512]
        ref, ref_lse, _ = attention_ref(*x, causal=causal)
        standard, _, _ = standard_attention(*x, causal=causal)
        assert_accurate("out", out[b], ref[0], standard[0])
        assert_lse("lse", lse[b], ref_lse[0])


def test_metadata():
    lengths = torch.zeros(5, dtype=torch.int32)
    metadata, num_splits = flash_mla.get_mla_metadata(lengths, 16, 1, num_heads_q=16)
    assert metadata.dtype == num_splits.dtype == torch.int32
    assert num_splits.shape == (6,)
    assert flash_mla.get_mla_metadata()[0].shape == metadata.shape


@pytest.mark.parametrize(
    ("name", "value"),
    [("is_fp8_kvcache", True), ("indices", torch.zeros(3, 1, 8)), ("descale_k", torch.ones(3))],
)
def test_refused(name, value):
    with pytest.raises(NotImplementedError, match=f"^{name}: got "):
        flash_mla.flash_mla_with_kvcache(*call("cpu"), 512, **{name: value})


@pytest.mark.parametrize("head_dim_v", [-64, 0, 577])
def test_columns_of_the_value(head_dim_v):
    with pytest.raises(ValueError, match=f"head_dim_v: got {head_dim_v} with a q of 576"):
        flash_mla.flash_mla_with_kvcache(*call("cpu"), head_dim_v)


def test_sinks():
    q, pages, table, lengths = call("cpu")
    sink = torch.full((4,), torch.inf)
    out, _ = flash_mla.flash_mla_with_kvcache(q, pages, table, lengths, 512, attn_sink=sink)
    assert not out.any()


def test_keys_of_too_many_columns():
    with pytest.raises(ValueError, match="q: got head_dim 88; accepted are 0 to 64"):
        flash_mla.flash_mla_with_kvcache(*call("cpu", columns=600), 512)
