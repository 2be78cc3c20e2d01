"""On Hopper a cluster of thread blocks may have a tile with many rows. Each block reads a part of
the keys, and they merge what they found through each other's shared memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import NAN, CacheCase, expected, make_cache
from compare import assert_accurate, assert_lse
from reference import attention_ref, standard_attention

from . import test_decode_appends, test_packed_decode
from .test_decode_kernels import DTYPES, ROWS, SMALL, check, id_of, run

CLUSTERED = [v for v in ROWS if v.scores == "plain" and v.warps >= 4 and not v.wide]
OTHERS = [v for v in ROWS if v not in CLUSTERED]
# Tiles of one sequence have so many pieces on as many multiprocessors.
ONE = CacheCase("one", b=1, h=8, hk=1, cache_seqlens=(3900,), cache_size=3968)
# Four multiprocessors for each.
SEVERAL = CacheCase("several", b=3, h=4, hk=1, sq=4, cache_seqlens=(1900, 100, 3), cache_size=1920)
FOURS = {"hopper_sms": 12, "cluster": 4}


@pytest.mark.parametrize("row", CLUSTERED, ids=id_of)
@pytest.mark.parametrize("cluster", [2, 4, 8, 16])
@pytest.mark.parametrize(("h", "sq"), [(8, 1), (5, 3)])
def test_sizes(kernels, row, cluster, h, sq):
    """Steps that do not share out evenly, of which the last one is short."""
    keys = row.block_n * row.warps * (2 * cluster + 1) - 5
    case = replace(ONE, h=h, sq=sq, d=row.head_dim, cache_seqlens=(keys,), cache_size=keys)
    check(kernels, row, case, hopper_sms=cluster, cluster=cluster)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize(
    "lengths", [(1900, 100, 3), (1900, 1900, 1900), (0, -1, 1920), (64, 0, 65)], ids=str
)
@pytest.mark.parametrize("page_size", [0, 16, 100])
def test_lengths(kernels, row, lengths, page_size):
    """Capacities choose, not lengths: blocks without keys, too."""
    case = replace(SEVERAL, cache_seqlens=lengths, page_size=page_size)
    x = make_cache(replace(case, dtype=DTYPES[row.dtype]), "cpu")
    table = x.extra.get("block_table")
    if table is not None:
        pages = -(-case.cache_size // page_size)  # of the table, however long sequences are
        x.extra["block_table"] = torch.full((3, pages), -1, dtype=torch.int32)
        x.extra["block_table"][:, : table.shape[1]] = table[:, :pages]
    ref, standard = (expected(case, x, f) for f in (attention_ref, standard_attention))
    out, lse = run(kernels, row, case, x, **FOURS)
    assert_accurate("out", out, ref.out, standard.out)
    assert_lse("lse", lse, ref.lse)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("largest", [1, 2, 4, 8])
def test_a_gpu_that_runs_no_clusters_so_large(kernels, row, largest):
    """Smaller ones do, or none at all."""
    check(kernels, row, ONE, hopper_sms=16, cluster=16, largest_cluster=largest)


@pytest.mark.parametrize("row", CLUSTERED, ids=id_of)
def test_many_steps_of_each_block(kernels, row):
    """Of tiles that would be cut into as many pieces as a cluster has blocks, and no more."""
    keys = 40 * row.block_n * row.warps - 5
    case = replace(ONE, d=row.head_dim, sinks=True, cache_seqlens=(keys,), cache_size=keys)
    check(kernels, row, case, hopper_sms=4, cluster=4)
    check(kernels, row, case, hopper_sms=6, cluster=1)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize(
    "case",
    [
        replace(ONE, window=(3000, -1)),
        replace(ONE, causal=False, window=(2500, 5)),
        replace(ONE, sinks=True),
        replace(ONE, leftpad=(700,)),
        replace(ONE, dv=40),
        replace(SEVERAL, sinks=True, leftpad=(3, 100, 0)),
    ],
    ids=range(6),
)
def test_what_is_seen(kernels, row, case):
    many = {"hopper_sms": 8, "cluster": 8} if case.b == 1 else FOURS
    check(kernels, row, case, **many)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_missing_pages_and_nan(kernels, row):
    """A block all of whose pages are missing has nothing to show, and NaN stays in its sequence."""
    case = replace(ONE, b=2, dtype=DTYPES[row.dtype], page_size=256, cache_seqlens=(3840, 3840))
    x = make_cache(case, "cpu")
    table = x.extra["block_table"] = x.extra["block_table"][:, :15].clone()
    x.k_cache[table[1, 3], 20] = NAN
    missing = [0, 1, 5, 14]
    table[0, missing] = -1
    out, lse = run(kernels, row, case, x, hopper_sms=16, cluster=8)
    kept = table[0][table[0] >= 0].long()
    k, v = (cache[kept].flatten(0, 1)[None] for cache in (x.k_cache, x.v_cache))
    ref, ref_lse, _ = attention_ref(x.q[:1], k, v)
    assert_accurate("out", out[:1], ref, standard_attention(x.q[:1], k, v)[0])
    assert_lse("lse", lse[:1], ref_lse)
    assert out[1].isnan().all()
    assert lse[1].isnan().all()


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("last_block_first", [False, True])
@pytest.mark.parametrize("before", [0, 1003, 3890])
def test_new_rows(kernels, row, before, last_block_first):
    case = replace(ONE, h=4, sq=4, new=4, cache_seqlens=(before,), rotary_dim=16)
    test_decode_appends.check(kernels, row, case, 0, last_block_first, hopper_sms=8, cluster=8)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_a_draft_s_window(kernels, row):
    """Packed: two tiles of rows, which read the same keys, and rows of no sequence."""
    batch = test_packed_decode.Batch(
        "window", q=(8,), k=(5000,), h=8, hk=2, window=(2047, 0), before=3, after=2
    )
    test_packed_decode.check(kernels, row, batch, hopper_sms=132, cluster=8)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("cluster", [4, 8])
def test_sequences_of_one_tensor(kernels, row, cluster):
    """Clusters have row blocks that no sequence has: of these the host knows an upper bound."""
    batch = test_packed_decode.Batch(
        "several", q=(3, 0, 5, 1, 2), k=(3000, 5, 700, 2900, 64), h=4, hk=2, before=3, after=2
    )
    test_packed_decode.check(kernels, row, batch, hopper_sms=8, cluster=cluster)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("num_splits", [1, 2, 100])
def test_the_caller_s_pieces_are_thread_blocks(kernels, row, num_splits):
    check(kernels, row, ONE, num_splits=num_splits, hopper_sms=16, cluster=1)


@pytest.mark.parametrize("row", OTHERS, ids=id_of)
def test_rows_that_do_more_than_read_have_none(kernels, row):
    check(kernels, row, replace(ONE, d=row.head_dim), hopper_sms=16, cluster=1)
