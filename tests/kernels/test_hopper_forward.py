"""What the Hopper forward does and others do not.

Searches by a warp, a shared queue, tensor maps of expanded tensors, warpgroups that leave blocks
out, a maximum that stays behind.
"""

from __future__ import annotations

import random

import pytest
import torch
from cases import BF16, FP16, Case, make_inputs
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, standard_attention, varlen_ref

from build_tools.instantiate import load_table

from . import calls

DTYPES = {"bf16": BF16, "fp16": FP16}
ROWS = [
    v for v in load_table().VARIANTS if (v.direction, v.arch, v.scores) == ("fwd", "sm90", "plain")
]
# One of three computing warpgroups, one of two.
SAMPLES = [v for v in ROWS if v.head_dim in (64, 128)]


def id_of(row) -> str:
    return row.name


def check_dense(kernels, row, q, k, v, **kwargs) -> None:
    out, lse = calls.dense(kernels, row.name, q, k, v, **kwargs)
    expected, expected_lse, _ = attention_ref(q, k, v, **kwargs)
    assert_accurate("out", out, expected, standard_attention(q, k, v, **kwargs)[0])
    assert_lse("lse", lse, expected_lse)


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
    starts = cu.tolist()
    expected = varlen_ref(attention_ref, q, k, v, starts, starts, causal=True)
    standard = varlen_ref(standard_attention, q, k, v, starts, starts, causal=True)
    assert_accurate("out", first[0], expected[0], standard[0])
    assert_lse("lse", first[1], expected[1])
    assert_bitwise("out", second[0], first[0])


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
def test_sequences_longer_than_was_said(kernels, row):
    """Up to one row block nobody searches: who draws a sequence goes on with its other blocks, and
    with the rows behind the last one, which become zeros."""
    gen = torch.Generator().manual_seed(5)
    cu = torch.tensor([0, 7, 7, 407, 500], dtype=torch.int32)
    q, k, v = torch.randn(3, 1000, 2, 64, generator=gen).to(DTYPES[row.dtype])
    call = dict(causal=True, max_seqlen_q=7)
    out, lse = calls.varlen(kernels, row.name, q, k, v, cu, cu, **call)
    starts = cu.tolist()
    expected = varlen_ref(attention_ref, q, k, v, starts, starts, causal=True)
    standard = varlen_ref(standard_attention, q, k, v, starts, starts, causal=True)
    assert_accurate("out", out, expected[0], standard[0])
    assert_lse("lse", lse, expected[1])
    assert not out[500:].any()


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
@pytest.mark.parametrize("group", [2, 3, 7, 16, 64])
@pytest.mark.parametrize("window", [(-1, -1), (100, 20)], ids=str)
def test_packed_heads(kernels, row, group, window):
    """Few queries, so that the heads of a KV head share row blocks; 3 and 7 leave rows over."""
    gen = torch.Generator().manual_seed(group)
    q = torch.randn(2, 21, 2 * group, 64, generator=gen).to(DTYPES[row.dtype])
    k, v = torch.randn(2, 2, 300, 2, 64, generator=gen).to(q.dtype)
    packed = row.block_m // 64 * (64 // group)
    call = dict(batch=2, seqlen_q=21, seqlen_k=300, heads_q=2 * group, heads_kv=2)
    assert kernels.packs_heads(calls.problem(**call), row.block_m, packed)
    sinks = torch.randn(2 * group, generator=gen)
    check_dense(kernels, row, q, k, v, causal=True, window_size=window, s_aux=sinks)
    check_dense(kernels, row, q, k, v, window_size=window)


@pytest.mark.parametrize("row", SAMPLES, ids=id_of)
@pytest.mark.parametrize("group", [3, 8])
@pytest.mark.parametrize("longest", [20, 150])
def test_packed_heads_of_a_packed_batch(kernels, row, group, longest):
    gen = torch.Generator().manual_seed(group)
    lengths = torch.randint(0, 30, (40,), generator=gen)
    lengths[-1] = longest
    cu = torch.zeros(41, dtype=torch.int32)
    cu[1:] = lengths.cumsum(0)
    q = torch.randn(int(cu[-1]) + 5, 2 * group, 64, generator=gen).to(DTYPES[row.dtype])
    k, v = torch.randn(2, int(cu[-1]), 2, 64, generator=gen).to(q.dtype)
    out, lse = calls.varlen(kernels, row.name, q, k, v, cu, cu, causal=True)
    starts = cu.tolist()
    expected = varlen_ref(attention_ref, q, k, v, starts, starts, causal=True)
    standard = varlen_ref(standard_attention, q, k, v, starts, starts, causal=True)
    assert_accurate("out", out, expected[0], standard[0])
    assert_lse("lse", lse, expected[1])


def test_heads_are_packed_where_that_is_less_work(kernels):
    """A row block of 128 queries, or of 16 with eight heads each."""

    def packs(seqlen_q, seqlen_k=4096, **options):
        call = dict(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=32, heads_kv=4)
        return kernels.packs_heads(calls.problem(**call | options), 128, 16)

    assert packs(1)
    assert packs(64)
    assert not packs(128)
    assert packs(129)
    assert not packs(4096)
    assert packs(512, 512, right=0)  # causal: fewer keys that only some of its queries see
    assert not packs(512, 512)
    assert not packs(512, 512, left=2000, right=2000)  # which limits nothing
    assert not packs(16384, 16384, right=0)
    assert packs(16384, 16384, left=200, right=0)
    assert not packs(1, heads_kv=32)
    pages = dict(block_table=1, cu_k=1, total_k=16)  # which counts pages, not keys
    assert not packs(512, right=0, **pages)


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
D128 = [row for row in TWO_TILES if row.head_dim == 128]
PACKED = dict(cu_q=1, cu_k=1, total_q=32768, total_k=32768, batch=257, seqlen_k=16384)


def asked(**more) -> dict:
    """A call without tensors, of heads that are apart."""
    call = dict(batch=2, seqlen_q=8192, seqlen_k=8192, heads_q=16, heads_kv=16)
    return calls.problem(**call | more) | {"q": (0, 0, 0, 128)}


@pytest.mark.parametrize("row", D128, ids=id_of)
@pytest.mark.parametrize(
    ("more", "is_second"),
    [
        ({}, True),
        ({"right": 0}, True),  # causal: half of them
        ({"right": 0, "seqlen_q": 2048, "seqlen_k": 2048}, False),
        ({"left": 1023, "right": 0}, False),
        ({"seqlen_q": 1024, "seqlen_k": 1024}, False),
        ({"seqlen_k": 528}, True),  # three tiles, and not five
        ({"heads_kv": 2, "seqlen_q": 8}, False),  # heads that share row blocks
        ({"key_splits": 4}, False),
        (PACKED, True),  # most rows are those of one long sequence
        (PACKED | {"right": 0}, True),
        (PACKED | {"left": 16000, "right": 0}, False),
        (PACKED | {"seqlen_k": 4096}, False),
        (PACKED | {"seqlen_k": 1 << 16}, False),  # nobody knows
        (PACKED | {"batch": 64, "seqlen_q": 512, "seqlen_k": 528, "total_k": 64 * 528}, True),
        (PACKED | {"batch_invariant": True}, False),
        ({"seqlen_k": 2**31 - 1, "right": 2**31 - 1}, True),
    ],
    ids=str,
)
def test_which_tile_a_call_takes(kernels, row, more, is_second):
    """As explain and FLASH_ATTN_LOG say it."""
    expected = row.second_block_n if is_second else row.block_n
    assert kernels.keys_of_tile(row.name, asked(**more)) == expected


# Keys of a tile for 512, 1k, … 16k tokens, full and causal: what was measured to be faster, or
# nearly as fast. Where nothing says more, equal tiles' shorter one.
GRID = {
    96: [(112, 96, 112, 112, 112, 112), (96, 96, 96, 112, 112, 112)],
    128: [(128, 128, 128, 176, 176, 176), (128, 128, 128, 128, 176, 176)],
    192: [(96, 96, 112, 112, 112, 112), (96, 96, 96, 112, 112, 112)],
    256: [(64, 80, 80, 80, 80, 80), (64, 64, 80, 80, 80, 80)],
}


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
@pytest.mark.parametrize("causal", [False, True])
def test_which_tiles_the_benchmark_takes(kernels, row, causal):
    lengths = [512 << n for n in range(6)]
    found = [
        kernels.keys_of_tile(row.name, asked(seqlen_q=n, seqlen_k=n, right=0 if causal else -1))
        for n in lengths
    ]
    assert found == list(GRID[row.head_dim][causal])


# Columns of O without room in shared memory.
FROM_REGISTERS = {(96, 96): 96, (96, 112): 96, (128, 128): 0, (128, 176): 64, (192, 96): 64,
                  (192, 112): 192, (256, 64): 128, (256, 80): 256}  # fmt: skip


def cost(row, block_n: int, call: dict) -> float:
    """Of a row block, in keys, counted row by row."""
    steps = []
    for begin in range(0, call["seqlen_q"], row.block_m):
        shift = call["seqlen_k"] - call["seqlen_q"]
        seen = set()
        for i in range(begin, min(begin + row.block_m, call["seqlen_q"])):
            first = 0 if call["left"] < 0 else max(0, i + shift - call["left"])
            end = call["seqlen_k"]
            end = end if call["right"] < 0 else min(end, i + shift + call["right"] + 1)
            seen |= {key // block_n for key in range(first, end)}
        steps.append(len(seen))
    columns = FROM_REGISTERS[row.head_dim, block_n]
    return (sum(steps) / len(steps) + 1) * (block_n + 28) + columns / 4


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
def test_the_tile_that_costs_less(kernels, row):
    """Of few row blocks, all of which the host looks at."""
    rng = random.Random(row.head_dim)
    found = []
    for _ in range(150):
        call = asked(
            seqlen_q=rng.randint(1, 700), seqlen_k=rng.randint(1, 2000),
            left=rng.choice([-1, -1, rng.randint(0, 800)]), right=rng.choice([-1, 0, 100]),
        )  # fmt: skip
        tiles = row.block_n, row.second_block_n
        expected = min(tiles, key=lambda block_n: cost(row, block_n, call))
        found.append(kernels.keys_of_tile(row.name, call))
        assert found[-1] == expected, call
    assert set(found) == {row.block_n, row.second_block_n}


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
@pytest.mark.parametrize("page_size", [8, 16, 48, 64, 72, 80, 256])
def test_which_tile_pages_take(kernels, row, page_size):
    """What is too long for a kernel of any keys, if the row has that."""
    call = calls.problem(batch=2, seqlen_q=8192, seqlen_k=8192, heads_q=16, heads_kv=16,
                         block_table=1, page_size=page_size) | {"q": (0, 0, 0, 128)}  # fmt: skip
    expected = row.second_block_n if row.second_block_n > 128 else row.block_n
    assert kernels.keys_of_tile(row.name, call) == expected
    assert kernels.keys_of_tile(row.name, call | {"few_q": 16}) == row.block_n  # beside decode
    packed = {"cu_q": 1, "cu_k": 1, "total_q": 16384, "total_k": 512}
    assert kernels.keys_of_tile(row.name, call | packed) == expected
    invariant = call | packed | {"batch_invariant": True}
    assert kernels.keys_of_tile(row.name, invariant) == row.block_n


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
def test_which_tile_a_page_of_equal_rows_takes(kernels, row):
    """One row that was expanded, whose distance is 0."""
    call = calls.problem(batch=2, seqlen_q=8192, seqlen_k=8192, heads_q=16, heads_kv=16,
                         block_table=1, page_size=16, pages=1)  # fmt: skip
    call |= {"q": (0, 0, 0, 128), "k": (0, 2048, 0, 128), "v": (0, 2048, 0, 128)}
    assert kernels.keys_of_tile(row.name, call) == row.block_n


# Keys of so many tiles of a row, which then cost less than the other ones.
def keys_of_tiles(block_n: int) -> int:
    return (5 if block_n == 80 else 3) * block_n


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
@pytest.mark.parametrize("tile", ["block_n", "second_block_n"])
@pytest.mark.parametrize("less", [0, 5])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (20, 40))], ids=str
)
def test_both_tiles(kernels, row, tile, less, causal, window):
    block_n, d = getattr(row, tile), row.head_dim - 8
    case = Case(
        dtype=DTYPES[row.dtype], b=1, h=2, hk=2, sq=70, sk=keys_of_tiles(block_n) - less, d=d
    )
    x = make_inputs(case)
    options = dict(causal=causal, window_size=window)
    on_its_tiles = kernels if window[0] >= 0 else calls.OnTiles(kernels, block_n)
    check_dense(on_its_tiles, row, x.q, x.k, x.v, **options)


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (3550, 20))], ids=str
)
def test_many_keys_take_longer_tiles(kernels, row, causal, window):
    case = Case(dtype=DTYPES[row.dtype], b=1, h=2, hk=2, sq=130, sk=4000, d=row.head_dim - 8)
    x = make_inputs(case)
    longer = calls.OnTiles(kernels, max(row.block_n, row.second_block_n))
    check_dense(longer, row, x.q, x.k, x.v, causal=causal, window_size=window)


@pytest.mark.parametrize("row", TWO_TILES, ids=id_of)
def test_tiles_of_an_average_length_unless_batch_invariant(kernels, row):
    """A sequence of few keys goes through the tiles that the others choose, or through its own."""
    gen = torch.Generator().manual_seed(9)
    # By itself the first takes the row's tile. The average takes the second: where that is the
    # shorter one, the other has few keys, too.
    first = keys_of_tiles(row.block_n) - 4
    last = 7200 if row.second_block_n > row.block_n else 500
    cu_q = torch.tensor([0, 20, 90], dtype=torch.int32)
    cu_k = torch.tensor([0, first, last], dtype=torch.int32)
    q = torch.randn(90, 1, row.head_dim, generator=gen).to(DTYPES[row.dtype])
    k, v = torch.randn(2, last, 1, row.head_dim, generator=gen).to(q.dtype)

    def call(sequences=2, **how):
        at, ends = slice(cu_q[sequences]), slice(cu_k[sequences])
        cu = cu_q[: sequences + 1], cu_k[: sequences + 1]
        return calls.varlen(kernels, row.name, q[at], k[ends], v[ends], *cu, causal=True, **how)

    (out, lse), (own, own_lse) = call(), call(batch_invariant=True)
    starts = cu_q.tolist(), cu_k.tolist()
    expected = varlen_ref(attention_ref, q, k, v, *starts, causal=True)
    standard = varlen_ref(standard_attention, q, k, v, *starts, causal=True)
    for result, result_lse in ((out, lse), (own, own_lse)):
        assert_accurate("out", result, expected[0], standard[0])
        assert_lse("lse", result_lse, expected[1])
    assert not torch.equal(lse, own_lse)  # sums of other tiles
    assert_bitwise("out", own[:20], call(1)[0])


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
    check_dense(calls.OnTiles(kernels, row.second_block_n), row, q, k, v, **options)


@pytest.mark.parametrize("row", STORED_LATE, ids=id_of)
@pytest.mark.parametrize(("causal", "window"), LIMITS, ids=str)
def test_sequences_stored_under_the_next(kernels, row, causal, window):
    """Some of them without queries, or without keys; the last rows are nobody's."""
    gen = torch.Generator().manual_seed(11)
    lengths_q = torch.tensor([0, 1, 130, 64, 0, 200, 17, 128, 65, 3])
    lengths_k = torch.tensor([9, 0, 190, 64, 0, 60, 0, 129, 128, 192])
    cu_q, cu_k = (torch.zeros(11, dtype=torch.int32) for _ in range(2))
    cu_q[1:], cu_k[1:] = lengths_q.cumsum(0), lengths_k.cumsum(0)
    q = torch.randn(int(cu_q[-1]) + 9, 1, 248, generator=gen).to(DTYPES[row.dtype])
    k, v = torch.randn(2, int(cu_k[-1]), 1, 248, generator=gen).to(q.dtype)
    options = dict(causal=causal, window_size=window)
    late = calls.OnTiles(kernels, row.second_block_n)
    out, lse = calls.varlen(late, row.name, q, k, v, cu_q, cu_k, **options)
    starts = cu_q.tolist(), cu_k.tolist()
    expected = varlen_ref(attention_ref, q, k, v, *starts, **options)
    standard = varlen_ref(standard_attention, q, k, v, *starts, **options)
    assert_accurate("out", out, expected[0], standard[0])
    assert_lse("lse", lse, expected[1])
