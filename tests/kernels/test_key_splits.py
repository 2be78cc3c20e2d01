"""Row blocks of Hopper's forward that are cut along the keys, and what becomes of their splits."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from cache_cases import CacheCase
from cases import BF16
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, standard_attention

from flash_attn import flash_attn_with_kvcache
from tests.kernels import library  # the one that every suite serves with: it registers once

from . import calls
from .rows import DTYPES, FORWARDS, id_of
from .test_hopper_forward import check_dense
from .test_packed_decode import Batch, expected, make
from .test_paged_kernels import check

ROWS = [v for v in FORWARDS if (v.arch, v.scores) == ("sm90", "plain")]
SAMPLES = [v for v in ROWS if v.head_dim in (64, 128)]


@dataclass
class KeySplits:
    """The kernels, with the keys of each row block in so many splits."""

    kernels: ModuleType
    splits: int

    def run(self, variant: str, call: dict) -> None:
        self.kernels.run(variant, call | {"key_splits": self.splits})


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize("splits", [2, 5, 16, 17, 32])
def test_splits_of_a_cache(kernels, row, splits):
    """More splits than blocks of keys, too, and sequences without any."""
    case = CacheCase(
        "splits", page_size=16, hk=2, h=8, sq=21, cache_seqlens=(500, 170, 0), window=(400, 0)
    )
    check(KeySplits(kernels, splits), row, case)


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
@pytest.mark.parametrize("group", [1, 3, 64])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (300, 5)}, {"s_aux": True}])
def test_parts_of_dense_keys(kernels, row, group, options):
    """Of any group; a sink is in one part of its row; columns that a row's head dim lacks."""
    gen = torch.Generator().manual_seed(group)
    q = torch.randn(2, 70, 2 * group, row.head_dim - 8, generator=gen)
    k, v = torch.randn(2, 2, 600, 2, row.head_dim - 8, generator=gen)
    if "s_aux" in options:
        options = {"s_aux": torch.randn(2 * group, generator=gen)}
    q, k, v = (x.to(DTYPES[row.dtype]) for x in (q, k, v))
    check_dense(KeySplits(kernels, 3), row, q, k, v, **options)


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
def test_parts_of_a_packed_batch(kernels, row):
    batch = Batch("splits", q=(90, 0, 40, 7), k=(310, 37, 150, 900), before=3, after=2, sinks=True)
    x = make(batch, DTYPES[row.dtype], row.head_dim)
    ref, standard = (expected(batch, x, f) for f in (attention_ref, standard_attention))
    out, lse = calls.varlen(
        KeySplits(kernels, 4), row.name, x.q, *x.held, x.cu_q, None, causal=True, s_aux=x.s_aux,
        **x.options,
    )  # fmt: skip
    assert_accurate("out", out, ref[0], standard[0])
    assert_lse("lse", lse, ref[1])


# Queries and heads of one KV head: rows on both sides of those that are merged all splits at once.
FEW_ROWS = [(1, 1), (73, 7), (64, 8)]
MANY_ROWS = [(57, 9)]


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
@pytest.mark.parametrize(("queries", "heads"), FEW_ROWS + MANY_ROWS)
@pytest.mark.parametrize("splits", [2, 3, 4, 5, 8, 9, 15, 16, 17])
def test_few_rows(kernels, row, queries, heads, splits):
    """Most splits see no key, and so do the first rows of all but one query."""
    gen = torch.Generator().manual_seed(queries)
    q = torch.randn(1, queries, heads, row.head_dim, generator=gen).to(DTYPES[row.dtype])
    keys = 300 if queries == 1 else 50
    k, v = torch.randn(2, 1, keys, 1, row.head_dim, generator=gen).to(q.dtype)
    check_dense(KeySplits(kernels, splits), row, q, k, v, causal=True)


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize("splits", [3, 16])
def test_bits_are_the_same_whichever_cta_merges(kernels, row, splits):
    """With another sequence beside them rows are too many to be merged all splits at once."""
    gen = torch.Generator().manual_seed(splits)
    q = torch.randn(2, 43, 7, row.head_dim, generator=gen).to(DTYPES[row.dtype])
    k = torch.randn(2, 1500, 1, row.head_dim, generator=gen).to(q.dtype)
    v = torch.randn(2, 1500, 1, row.head_dim_v, generator=gen).to(q.dtype)
    few = calls.dense(KeySplits(kernels, splits), row.name, q[:1], k[:1], v[:1])
    many = calls.dense(KeySplits(kernels, splits), row.name, q, k, v)
    assert_bitwise("out", many[0][:1], few[0])
    assert_bitwise("lse", many[1][:1], few[1])


@pytest.mark.parametrize(("queries", "heads"), FEW_ROWS + MANY_ROWS)
@pytest.mark.parametrize("splits", [2, 16, 17])
def test_which_rows_are_merged_at_once(kernels, queries, heads, splits):
    call = calls.problem(batch=1, seqlen_q=queries, seqlen_k=4096, heads_q=heads, heads_kv=1)
    few = (queries, heads) in FEW_ROWS
    assert kernels.merges_at_once(call | {"key_splits": splits}) == (few and splits <= 16)


def planned_splits(kernels, name="fwd_sm90_bf16_d128_plain", **more) -> int:
    call = calls.problem(batch=1, seqlen_q=8, seqlen_k=32768, heads_q=32, heads_kv=8, head_dim=128)
    return kernels.plan_forward(name, call | {"head_dim_v": 128, "q": (0, 0, 0, 128)} | more)[
        "splits"
    ]


def test_splits_fill_the_gpu(kernels):
    assert planned_splits(kernels) >= 12
    assert planned_splits(kernels, batch_invariant=True) == 1
    assert planned_splits(kernels, name="fwd_sm80_bf16_d128_plain") == 1
    assert planned_splits(kernels, q=(0, 0, 0, 0)) == 1  # all heads have the same queries
    assert planned_splits(kernels, few_q=1) == 1  # beside decode
    assert planned_splits(kernels, seqlen_q=4096) == 1


@pytest.mark.parametrize("left", [127, 1023, 8191])
def test_keys_outside_of_a_window_are_not_shared_out(kernels, left):
    """At most a split for each block of keys that some query of a row block sees."""
    splits = planned_splits(kernels, left=left, right=0)
    assert splits <= -(-(left + 1 + 32) // 128) + 1


@pytest.mark.parametrize("num_splits", [1, 5, 40])
def test_no_more_splits_than_the_caller_wants(kernels, num_splits):
    assert planned_splits(kernels, num_splits=num_splits) <= num_splits


def test_a_call_that_wants_one_part(kernels, monkeypatch):
    gen = torch.Generator().manual_seed(1)
    q = torch.randn(1, 70, 2, 64, generator=gen).to(BF16)
    k, v = torch.randn(2, 1, 4096, 1, 64, generator=gen).to(BF16)
    with library.serving(monkeypatch, 90):
        (_, split), (out, lse) = (
            flash_attn_with_kvcache(q, k, v, num_splits=n, return_lse=True) for n in (0, 1)
        )
    whole = calls.cached(kernels, "fwd_sm90_bf16_d64_plain", q, k, v, num_splits=None)
    assert_bitwise("out", out, whole[0])
    assert_bitwise("lse", lse, whole[1])
    assert not torch.equal(split, lse)  # sums of splits


@pytest.mark.parametrize("said", [0, 1, 40])
@pytest.mark.parametrize("total", [500, 2_000_000])
def test_a_longest_sequence_shorter_than_it_is(kernels, said, total):
    """What is said of lengths may be wrong: nothing may be divided by it, and the workspace, which
    has all rows once for each split, does not grow with it."""
    ends = torch.tensor([0, 3, total], dtype=torch.int32)
    more = dict(batch=2, seqlen_q=said, seqlen_k=60_000, cu_q=ends.data_ptr(), total_q=total)
    splits = planned_splits(kernels, **more)
    assert 1 <= splits <= (32 if total < 1000 else 1)
