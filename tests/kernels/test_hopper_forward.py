"""What the Hopper forward does and others do not.

Searches by a warp, a shared queue, tensor maps of expanded tensors, warpgroups that leave blocks
out, a maximum that stays behind.
"""

from __future__ import annotations

import pytest
import torch
from cases import Case, make_inputs
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, standard_attention, varlen_ref

from . import calls
from .rows import DTYPES, FORWARDS, id_of

ROWS = [v for v in FORWARDS if (v.arch, v.scores) == ("sm90", "plain")]
# One of three computing warpgroups, one of two.
SAMPLES = [v for v in ROWS if v.head_dim in (64, 128)]


def check_dense(kernels, row, q, k, v, **kwargs) -> None:
    out, lse = calls.dense(kernels, row.name, q, k, v, **kwargs)
    expected, expected_lse, _ = attention_ref(q, k, v, **kwargs)
    assert_accurate("out", out, expected, standard_attention(q, k, v, **kwargs)[0])
    assert_lse("lse", lse, expected_lse)


def check_packed(result, q, k, v, cu_q, cu_k, **options) -> None:
    """out and lse of a call of sequences."""
    starts = cu_q.tolist(), cu_k.tolist()
    expected, standard = (
        varlen_ref(attention, q, k, v, *starts, **options)
        for attention in (attention_ref, standard_attention)
    )
    assert_accurate("out", result[0], expected[0], standard[0])
    assert_lse("lse", result[1], expected[1])


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
@pytest.mark.parametrize("batch", [34, 80, 1200])
@pytest.mark.parametrize("longest", [40, 300])
def test_a_tile_finds_its_sequence_among_many(kernels, row, batch, longest):
    """With a sequence longer than a row block there is a search, of 33 candidates a round. Used
    twice, because a launch leaves the queue's counter to the next one."""
    gen = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 9 if batch > 100 else 40, (batch,), generator=gen)
    lengths[torch.rand(batch, generator=gen) < 0.3] = 0
    lengths[batch // 2] = longest
    cu = torch.zeros(batch + 1, dtype=torch.int32)
    cu[1:] = lengths.cumsum(0)
    total = int(cu[-1])
    q, k, v = torch.randn(3, total, 1, 32, generator=gen).to(DTYPES[row.dtype])
    first = calls.varlen(kernels, row.name, q, k, v, cu, cu, causal=True)
    second = calls.varlen(kernels, row.name, q, k, v, cu, cu, causal=True)
    check_packed(first, q, k, v, cu, cu, causal=True)
    assert_bitwise("out", second[0], first[0])


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
def test_sequences_longer_than_was_said(kernels, row):
    """Up to one row block no warp searches: the CTA that draws a sequence goes on with its other
    blocks, and with the rows after the last one, which become zeros."""
    gen = torch.Generator().manual_seed(5)
    cu = torch.tensor([0, 7, 7, 407, 500], dtype=torch.int32)
    q, k, v = torch.randn(3, 1000, 2, 64, generator=gen).to(DTYPES[row.dtype])
    call = dict(causal=True, max_seqlen_q=7)
    result = calls.varlen(kernels, row.name, q, k, v, cu, cu, **call)
    check_packed(result, q, k, v, cu, cu, causal=True)
    assert not result[0][500:].any()


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
@pytest.mark.parametrize("group", [2, 3, 7, 16, 64])
@pytest.mark.parametrize("window", [(-1, -1), (100, 20)], ids=str)
def test_packed_heads(kernels, row, group, window):
    """Few queries, so that the heads of a KV head share row blocks; 3 and 7 leave rows over."""
    gen = torch.Generator().manual_seed(group)
    q = torch.randn(2, 21, 2 * group, 64, generator=gen).to(DTYPES[row.dtype])
    k, v = torch.randn(2, 2, 300, 2, 64, generator=gen).to(q.dtype)
    sinks = torch.randn(2 * group, generator=gen)
    packed = calls.OnTile(kernels, "packed")
    check_dense(packed, row, q, k, v, causal=True, window_size=window, s_aux=sinks)
    check_dense(packed, row, q, k, v, window_size=window)


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
@pytest.mark.parametrize("group", [3, 8])
@pytest.mark.parametrize("longest", [20, 150])
@pytest.mark.parametrize("tile", ["first", "packed"])
def test_packed_heads_of_a_packed_batch(kernels, row, group, longest, tile):
    gen = torch.Generator().manual_seed(group)
    lengths = torch.randint(0, 30, (40,), generator=gen)
    lengths[-1] = longest
    cu = torch.zeros(41, dtype=torch.int32)
    cu[1:] = lengths.cumsum(0)
    q = torch.randn(int(cu[-1]) + 5, 2 * group, 64, generator=gen).to(DTYPES[row.dtype])
    k, v = torch.randn(2, int(cu[-1]), 2, 64, generator=gen).to(q.dtype)
    on_tile = calls.OnTile(kernels, tile)
    result = calls.varlen(on_tile, row.name, q, k, v, cu, cu, causal=True)
    check_packed(result, q, k, v, cu, cu, causal=True)


def test_keys_of_a_cache_with_odd_strides(kernels):
    """Batch entries that are not whole rows apart: their keys cannot end before the tensor does."""
    row = SAMPLES[0]
    gen = torch.Generator().manual_seed(6)
    q = torch.randn(2, 70, 2, 64, generator=gen).to(DTYPES[row.dtype])
    memory = torch.randn(2, 2, 100 * 128 + 8, generator=gen).to(q.dtype)
    k, v = (x[:, : 100 * 128].view(2, 100, 2, 64) for x in memory)
    check_dense(kernels, row, q, k, v, causal=True)
    used = torch.tensor([60, 99], dtype=torch.int32)
    with pytest.raises(ValueError, match="12808 elements apart, expected a multiple"):
        calls.cached(kernels, row.name, q, k, v, cache_seqlens=used, num_splits=None)


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
@pytest.mark.parametrize("sq", [1, 64, 65, 127, 128, 191, 193, 400])
@pytest.mark.parametrize("window", [(-1, -1), (100, 20), (3, 0)], ids=str)
def test_warpgroups_with_fewer_blocks_than_others(kernels, row, sq, window):
    case = Case(dtype=DTYPES[row.dtype], b=1, h=1, hk=1, sq=sq, sk=400, d=64)
    x = make_inputs(case)
    check_dense(kernels, row, x.q, x.k, x.v, causal=True, window_size=window)


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
def test_expanded_tensors(kernels, row):
    """A stride of 0 in the heads or in the batch: a tensor map has no such dimension."""
    gen = torch.Generator().manual_seed(3)
    q = torch.randn(2, 70, 4, 64, generator=gen).to(DTYPES[row.dtype])
    k, v = torch.randn(2, 1, 90, 1, 64, generator=gen).to(q.dtype)
    check_dense(kernels, row, q, k.expand(2, 90, 2, 64), v.expand(2, 90, 2, 64), causal=True)
    q_one = q[:1, :, :1].expand(2, 70, 4, 64)
    check_dense(kernels, row, q_one, k.expand(2, 90, 2, 64), q[:, :1, :2].expand(2, 90, 2, 64))


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize("growth", [0.5, 3.0, 40.0])
def test_the_maximum_grows_from_block_to_block(kernels, row, growth):
    """Blocks come from the right. By less than a maximum may stay behind, by more, by far more."""
    gen = torch.Generator().manual_seed(4)
    d = row.head_dim
    q = torch.ones(1, 70, 1, d)
    k = torch.randn(1, 600, 1, d, generator=gen) / d**0.5
    k += growth * (torch.arange(600, 0, -1) // 64)[None, :, None, None] / d**0.5
    v = torch.randn(1, 600, 1, row.head_dim_v, generator=gen)
    check_dense(kernels, row, *(x.to(DTYPES[row.dtype]) for x in (q, k, v)))


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
def test_a_cache_of_one_row(kernels, row):
    """Its rows have no distance; batch entries and heads do."""
    gen = torch.Generator().manual_seed(7)
    q = torch.randn(3, 40, 2, 64, generator=gen).to(DTYPES[row.dtype])
    k, v = torch.randn(2, 3, 1, 2, 64, generator=gen).to(q.dtype)
    used = torch.ones(3, dtype=torch.int32)
    out, _ = calls.cached(kernels, row.name, q, k, v, cache_seqlens=used, num_splits=None)
    assert_bitwise("out", out, v.expand(3, 40, 2, 64))


TWO_TILES = [row for row in ROWS if row.second_block_n]


# Keys of so many tiles of a row: there a few hold just all of them.
def keys_of_tiles(block_n: int) -> int:
    return (5 if block_n == 80 else 3) * block_n


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
@pytest.mark.parametrize("page_size", [8, 16, 72, 256])
def test_which_tile_pages_take(kernels, row, page_size):
    """Tiles that are too long for a kernel of any keys have a kernel for pages; not so others."""
    call = calls.problem(batch=2, seqlen_q=8192, seqlen_k=8192, heads_q=16, heads_kv=16,
                         head_dim=row.head_dim, head_dim_v=row.head_dim_v,
                         block_table=1, page_size=page_size) | {"q": (0, 0, 0, 256)}  # fmt: skip

    def tile(**more):
        return kernels.plan_forward(row.name, call | more)["tile"]

    packed = {"cu_q": 1, "cu_k": 1, "total_q": 16384, "total_k": 512}
    expected = "second" if row.second_block_n > 128 else "first"
    assert tile() == tile(**packed) == expected
    assert tile(few_q=16) == "first"  # beside decode
    assert tile(**packed, batch_invariant=True) == "first"
    assert tile(head_dim=row.head_dim - 8) == "first"
    apart = {"pages": 2, "k": (0, 257 * 8, 256, 256), "v": (0, 257 * 8, 256, 256)}
    assert tile(**apart) == "first"  # pages that are no multiple of 8 rows apart


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
@pytest.mark.parametrize("tile", ["first", "second"])
@pytest.mark.parametrize("less", [0, 5])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (20, 40))], ids=str
)
def test_both_tiles(kernels, row, tile, less, causal, window):
    block_n = row.block_n if tile == "first" else row.second_block_n
    d = row.head_dim - 8
    case = Case(
        dtype=DTYPES[row.dtype], b=1, h=2, hk=2, sq=70, sk=keys_of_tiles(block_n) - less, d=d
    )
    x = make_inputs(case)
    options = dict(causal=causal, window_size=window)
    check_dense(calls.OnTile(kernels, tile), row, x.q, x.k, x.v, **options)


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (3550, 20))], ids=str
)
def test_many_keys(kernels, row, causal, window):
    case = Case(dtype=DTYPES[row.dtype], b=1, h=2, hk=2, sq=130, sk=4000, d=row.head_dim - 8)
    x = make_inputs(case)
    longer = calls.OnTile(kernels, "first" if row.block_n > row.second_block_n else "second")
    check_dense(longer, row, x.q, x.k, x.v, causal=causal, window_size=window)


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
def test_tiles_of_an_average_length_unless_batch_invariant(kernels, row):
    """A sequence of few keys goes through the tiles that the others choose, or through its own."""
    gen = torch.Generator().manual_seed(9)
    # Where lengths differ and where they do not, on tiles of either kind.
    first = keys_of_tiles(row.block_n) - 4
    last = 7200 if row.second_block_n > row.block_n else 500
    cu_q = torch.tensor([0, 20, 90], dtype=torch.int32)
    cu_k = torch.tensor([0, first, last], dtype=torch.int32)
    q = torch.randn(90, 1, row.head_dim, generator=gen).to(DTYPES[row.dtype])
    k, v = torch.randn(2, last, 1, row.head_dim, generator=gen).to(q.dtype)

    def call(kernels, sequences=2, **how):
        at, ends = slice(cu_q[sequences]), slice(cu_k[sequences])
        cu = cu_q[: sequences + 1], cu_k[: sequences + 1]
        return calls.varlen(kernels, row.name, q[at], k[ends], v[ends], *cu, causal=True, **how)

    on_second = calls.OnTile(kernels, "second")
    second, own = call(on_second), call(kernels, batch_invariant=True)
    for result in (second, own):
        check_packed(result, q, k, v, cu_q, cu_k, causal=True)
    assert not torch.equal(second[1], own[1])  # sums of other tiles
    assert_bitwise("out", own[0][:20], call(kernels, 1, batch_invariant=True)[0])


# Row blocks that are stored under the next one's first scores. Three multiprocessors have several
# each.
STORED_LATE = [row for row in TWO_TILES if row.second_block_n == 64]
LIMITS = [(False, (-1, -1)), (True, (-1, -1)), (False, (70, 20))]


@pytest.mark.parametrize("row", STORED_LATE, ids=id_of)
@pytest.mark.parametrize("keys", [3, 187])
@pytest.mark.parametrize(("d", "dv"), [(256, 256), (200, 72)])
@pytest.mark.parametrize(("causal", "window"), LIMITS, ids=str)
def test_row_blocks_stored_under_the_next(kernels, row, keys, d, dv, causal, window):
    """With three keys one has a single step or, of limits, none for its first rows."""
    gen = torch.Generator().manual_seed(keys)
    q = torch.randn(2, 300, 2, d, generator=gen).to(DTYPES[row.dtype])
    k, v = (torch.randn(2, keys, 2, width, generator=gen).to(q.dtype) for width in (d, dv))
    options = dict(causal=causal, window_size=window, s_aux=torch.randn(2, generator=gen))
    check_dense(calls.OnTile(kernels, "second"), row, q, k, v, **options)


@pytest.mark.parametrize("row", STORED_LATE, ids=id_of)
@pytest.mark.parametrize(("causal", "window"), LIMITS, ids=str)
def test_sequences_stored_under_the_next(kernels, row, causal, window):
    """Some of them without queries, or without keys; the last rows are in no sequence."""
    gen = torch.Generator().manual_seed(11)
    lengths_q = torch.tensor([0, 1, 130, 64, 0, 200, 17, 128, 65, 3])
    lengths_k = torch.tensor([9, 0, 190, 64, 0, 60, 0, 129, 128, 192])
    cu_q, cu_k = (torch.zeros(11, dtype=torch.int32) for _ in range(2))
    cu_q[1:], cu_k[1:] = lengths_q.cumsum(0), lengths_k.cumsum(0)
    q = torch.randn(int(cu_q[-1]) + 9, 1, 248, generator=gen).to(DTYPES[row.dtype])
    k, v = torch.randn(2, int(cu_k[-1]), 1, 248, generator=gen).to(q.dtype)
    options = dict(causal=causal, window_size=window)
    late = calls.OnTile(kernels, "second")
    result = calls.varlen(late, row.name, q, k, v, cu_q, cu_k, **options)
    check_packed(result, q, k, v, cu_q, cu_k, **options)
