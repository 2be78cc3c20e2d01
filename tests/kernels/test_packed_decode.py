"""Packed batches whose sequences have few queries, all of them or some: the decode kernel, alone or
beside the forward kernel that has the others."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from any_contents import any_mask, int32, numbers, offsets
from cases import BF16, poisoned
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, random_slopes, standard_attention, varlen_ref
from torch import Tensor

from . import calls
from .rows import DTYPES, FORWARDS, TABLE, id_of
from .test_decode_kernels import WINDOWS

ROWS = [v for v in TABLE if (v.direction, v.cached_bits) == ("decode", 16)]
FULL = [v for v in ROWS if v.scores == "full"]
# What does not depend on the row.
SMALL = [v for v in ROWS if v.head_dim == 64 and v.scores == "plain" and v.dtype == "bf16"]
NAN = float("nan")


@dataclass(frozen=True)
class Batch:
    """One call. Rows of q before the first sequence and after the last one hold NaN, and so does
    whatever of keys and pages no sequence sees."""

    name: str
    q: tuple[int, ...] = (1, 3, 0, 2)
    k: tuple[int, ...] = (310, 37, 5, 150)
    page_size: int = 16  # 0: keys are packed, too
    h: int = 4
    hk: int = 2
    d: int = 256  # or what the row has, if that is less
    before: int = 0
    after: int = 0
    leftpad: tuple[int, ...] | None = None
    by_used: bool = True  # seqused_k says how many keys there are, not cu_seqlens_k
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None
    sinks: bool = False
    said: int | None = None  # max_seqlen_q
    missing: tuple[tuple[int, int], ...] = ()  # entries of the block table that are -1


@dataclass
class Inputs:
    q: Tensor
    k: Tensor  # packed (total_k, hk, d), without gaps
    v: Tensor
    cu_q: Tensor
    cu_k: Tensor
    held: tuple[Tensor, Tensor]  # k and v as the call gets them
    options: dict = field(repr=False)
    slopes: Tensor | None
    s_aux: Tensor | None


def starts(lengths, first: int = 0) -> Tensor:
    return int32([first, *lengths]).cumsum(0, dtype=torch.int32)


def into_pages(batch: Batch, x: Tensor, order: list[list[int]], pages: int) -> Tensor:
    held = torch.full((pages, batch.page_size, *x.shape[1:]), NAN, dtype=x.dtype)
    row = 0
    for b, length in enumerate(batch.k):
        for n in range(length):
            if n >= (batch.leftpad[b] if batch.leftpad else 0):
                held[order[b][n // batch.page_size], n % batch.page_size] = x[row + n]
        row += length
    return poisoned(held)


def make(batch: Batch, dtype: torch.dtype, d: int) -> Inputs:
    gen = torch.Generator().manual_seed(len(batch.name))
    d = min(d, batch.d)
    cu_q, cu_k = starts(batch.q, batch.before), starts(batch.k)
    q = torch.randn(int(cu_q[-1]) + batch.after, batch.h, d, generator=gen).to(dtype)
    q[: batch.before] = q[int(cu_q[-1]) :] = NAN
    k, v = (torch.randn(int(cu_k[-1]), batch.hk, d, generator=gen).to(dtype) for _ in "kv")
    options: dict = {}
    if batch.leftpad:
        options["leftpad_k"] = int32(batch.leftpad)
    if batch.page_size == 0:
        for x in (k, v):
            for b, first in enumerate(batch.leftpad or ()):
                x[int(cu_k[b]) : int(cu_k[b]) + first] = NAN
        held = (poisoned(k), poisoned(v))
        options["max_seqlen_k"] = 2000  # fewer are not worth it
    else:
        needed = [-(-n // batch.page_size) for n in batch.k]
        pages = sum(needed) + 3
        free = torch.randperm(pages, generator=gen).tolist()
        order = [[free.pop() for _ in range(n)] for n in needed]
        table = torch.full((len(needed), max(needed) + 2), -1, dtype=torch.int32)
        for b, listed in enumerate(order):
            table[b, : len(listed)] = int32(listed)
        for b, entry in batch.missing:
            table[b, entry] = -1
        held = tuple(into_pages(batch, x, order, pages) for x in (k, v))
        options["block_table"] = table
        if batch.by_used:
            options["seqused_k"] = int32(batch.k)
    slopes = s_aux = None
    if batch.alibi:
        shape = (batch.h,) if batch.alibi == "h" else (len(batch.q), batch.h)
        slopes = random_slopes(shape, gen)
    if batch.sinks:
        s_aux = torch.randn(batch.h, generator=gen)
    return Inputs(poisoned(q), k, v, cu_q, cu_k, held, options, slopes, s_aux)


def beside(row) -> str:
    """The forward kernel with pages of the same head dim."""
    return row.name.replace("decode", "paged")


def run(
    kernels, row, batch: Batch, x: Inputs, forward: str | None = None, **more
) -> tuple[Tensor, Tensor]:
    """forward: the kernel that has the longer sequences, if not the one of the same family."""
    cu_k = None if "seqused_k" in x.options else x.cu_k
    return calls.varlen(
        kernels, forward or beside(row), x.q, *x.held, x.cu_q, cu_k, few=row.name,
        causal=batch.causal, window_size=batch.window, softcap=batch.softcap,
        alibi_slopes=x.slopes, s_aux=x.s_aux, max_seqlen_q=batch.said, **x.options, **more,
    )  # fmt: skip


def expected(batch: Batch, x: Inputs, attention) -> tuple[Tensor, Tensor]:
    return varlen_ref(
        attention, x.q, x.k, x.v, x.cu_q.tolist(), x.cu_k.tolist(), leftpad_k=batch.leftpad,
        causal=batch.causal, window_size=batch.window, softcap=batch.softcap,
        alibi_slopes=x.slopes, s_aux=x.s_aux,
    )  # fmt: skip


def check(kernels, row, batch: Batch, **more) -> None:
    x = make(batch, DTYPES[row.dtype], row.head_dim)
    ref, standard = (expected(batch, x, f) for f in (attention_ref, standard_attention))
    out, lse = run(kernels, row, batch, x, **more)
    assert_accurate("out", out, ref[0], standard[0])
    assert_lse("lse", lse, ref[1])


# ---- all sequences have few queries -------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize(
    "batch",
    [
        Batch("one_each", q=(1, 1, 1), k=(310, 3, 40)),
        Batch("mixed_and_empty", q=(3, 0, 1, 2, 0), k=(310, 40, 0, 33, 0)),
        Batch("several_row_blocks", q=(11, 0, 20, 3), k=(200, 33, 310, 2)),
        Batch("packed_keys", page_size=0, q=(1, 0, 9, 2), k=(310, 4, 100, 0)),
    ],
    ids=id_of,
)
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_lengths(kernels, row, batch, num_splits):
    check(kernels, row, replace(batch, before=2, after=3), num_splits=num_splits)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("page_size", [0, 1, 3, 16, 100, 256])
@pytest.mark.parametrize("by_used", [False, True])
@pytest.mark.parametrize("num_splits", [0, 1, 100])
def test_pages(kernels, row, page_size, by_used, num_splits):
    batch = Batch("pages", q=(2, 1, 0, 5), k=(700, 0, 33, 260), page_size=page_size)
    check(kernels, row, replace(batch, by_used=by_used), num_splits=num_splits)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize(("h", "hk"), [(2, 2), (8, 2), (7, 1), (16, 2), (20, 1), (64, 1)])
@pytest.mark.parametrize("longest", [1, 3, 16])
def test_packed_heads(kernels, row, h, hk, longest):
    """Groups that fill several tiles with a query, and queries that share one."""
    longest = min(longest, 64 * hk // h)
    batch = Batch("heads", q=(longest, 0, 1), k=(160, 41, 70), h=h, hk=hk, after=3)
    check(kernels, row, batch, num_splits=2)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize(
    "batch",
    [
        *(Batch(name, **mask) for name, mask in WINDOWS.items()),
        Batch("leftpad", leftpad=(30, 500, 0, 7)),
        Batch("leftpad_all", leftpad=(390, 520, 0, 40)),
        Batch("leftpad_window", leftpad=(30, 500, 0, 7), window=(100, -1)),
    ],
    ids=id_of,
)
@pytest.mark.parametrize("page_size", [0, 100])
@pytest.mark.parametrize("num_splits", [0, 4])
def test_visible_keys(kernels, row, batch, page_size, num_splits):
    batch = replace(batch, q=(3, 1, 0, 9), k=(390, 520, 0, 40), page_size=page_size, after=1)
    check(kernels, row, batch, num_splits=num_splits)


@pytest.mark.parametrize("row", FULL, ids=id_of)
@pytest.mark.parametrize(
    "batch",
    [
        Batch("softcap", softcap=3.0),
        Batch("alibi", alibi="h"),
        Batch("sinks", sinks=True, k=(0, 300, 10, 1)),
        Batch("all", softcap=20.0, alibi="bh", sinks=True, window=(150, -1)),
    ],
    ids=id_of,
)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_score_mods(kernels, row, batch, num_splits):
    check(kernels, row, replace(batch, h=8, before=1, after=2), num_splits=num_splits)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_many_sequences(kernels, row):
    """More than a warp searches at once, most of them short, some without queries."""
    lengths = [(7 * b) % 50 for b in range(70)]
    lengths[40], lengths[69] = 900, 333
    batch = Batch("many", q=tuple(b % 4 for b in range(70)), k=tuple(lengths), h=2, hk=2)
    check(kernels, row, batch, num_splits=9)
    check(kernels, row, replace(batch, q=(3, *batch.q[1:-1], 20)), num_splits=9)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_more_sequences_than_are_cut(kernels, row):
    """Batches in which no CTA searches its sequence."""
    batch = Batch("more", q=tuple(b % 3 for b in range(60)), k=tuple(5 * b for b in range(60)))
    check(kernels, row, replace(batch, h=20, hk=2, before=1, after=40))


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("longest", [1, 3, 20])
def test_merging(kernels, row, longest):
    """The CTA that is last merges in the same order, and leaves counters at 0."""
    keys = 23 * row.block_n * row.warps - 5
    batch = Batch("merging", q=(longest, 1, 0), k=(keys, 100, 50), h=3, hk=1)
    x = make(batch, DTYPES[row.dtype], row.head_dim)
    ref, standard = (expected(batch, x, f) for f in (attention_ref, standard_attention))
    first, *others = (
        run(kernels, row, batch, x, num_splits=100, last_block_first=last_block_first)
        for last_block_first in (False, True, True, False)
    )
    assert_accurate("out", first[0], ref[0], standard[0])
    assert_lse("lse", first[1], ref[1])
    for out, lse in others:
        assert_bitwise("out", out, first[0])
        assert_bitwise("lse", lse, first[1])


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_missing_page_has_no_keys(kernels, row, num_splits):
    batch = Batch("missing", q=(2, 1), k=(310, 40), causal=False)
    x = make(replace(batch, missing=((0, 0), (0, 7), (1, 0), (1, 1), (1, 2))), BF16, 64)
    out, lse = run(kernels, row, batch, x, num_splits=num_splits)
    kept = torch.ones(310, dtype=torch.bool)
    kept[:16] = kept[7 * 16 : 8 * 16] = False
    ref, ref_lse, _ = attention_ref(
        x.q[None, :2], x.k[None, :310][:, kept], x.v[None, :310][:, kept]
    )
    assert_accurate("out", out[None, :2], ref, ref.to(BF16))
    assert_lse("lse", lse[None, :, :2].contiguous(), ref_lse)
    assert not out[2].any()
    assert torch.isneginf(lse[:, 2]).all()


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("before", [0, 30])
@pytest.mark.parametrize("after", [0, 200])
def test_rows_of_no_sequence_become_zeros(kernels, row, num_splits, before, after):
    """Many of them, as padding of a captured graph leaves; also where there is nothing else."""
    batch = Batch("padding", q=(1, 2, 0), k=(100, 30, 5), before=before, after=after)
    check(kernels, row, batch, num_splits=num_splits)
    if before + after > 0:
        check(kernels, row, replace(batch, q=(0, 0, 0), said=1), num_splits=num_splits)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("said", [1, 20])
def test_a_sequence_longer_than_was_said(kernels, row, num_splits, said):
    """Is right all the same: one thread block goes through its rows."""
    batch = Batch("longer", q=(2, 70, 1, 100), k=(100, 300, 50, 0), said=said, after=3)
    check(kernels, row, batch, num_splits=num_splits)


# ---- beside the forward kernel ------------------------------------------------------------------


MIXED = [v for v in ROWS if any(v.name.replace("decode", "paged") == row.name for row in TABLE)]
SIZE_AND_SCORES = ("head_dim", "head_dim_v", "dtype", "scores")
HOPPER = [
    (row, forward)
    for row in ROWS
    for forward in FORWARDS
    if forward.arch == "sm90"
    and all(getattr(forward, name) == getattr(row, name) for name in SIZE_AND_SCORES)
]


@pytest.mark.parametrize("row", MIXED, ids=id_of)
@pytest.mark.parametrize(
    "batch",
    [
        Batch("a_chunk", q=(1, 150, 0, 2), k=(310, 170, 5, 150)),
        Batch("chunks", q=(70, 1, 33, 32, 1), k=(80, 33, 33, 100, 0), page_size=7),
        Batch("only_chunks", q=(150, 40), k=(160, 300), page_size=1),
        Batch("only_few", q=(3, 1, 20), k=(160, 300, 40), said=400, after=130),
    ],
    ids=id_of,
)
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_mixed_batches(kernels, row, batch, num_splits):
    if row.scores == "full":
        batch = replace(batch, softcap=20.0, alibi="bh", sinks=True)
    check(kernels, row, replace(batch, before=2, after=3 + batch.after), num_splits=num_splits)


@pytest.mark.parametrize(("row", "forward"), HOPPER, ids=id_of)
@pytest.mark.parametrize(
    "batch",
    [
        Batch("a_chunk", q=(1, 150, 0, 2), k=(310, 170, 5, 150)),
        Batch("chunks", q=(70, 1, 33, 32, 1), k=(80, 33, 33, 100, 0), page_size=8),
        Batch("long_chunks", q=(2, 300, 150, 1), k=(90, 500, 160, 300), page_size=256),
        Batch("a_group", q=(90, 1, 20, 7), k=(200, 33, 33, 70), page_size=24, h=8, hk=1),
        Batch("only_few", q=(3, 1, 20), k=(160, 300, 40), said=400, after=130),
    ],
    ids=id_of,
)
def test_mixed_batches_on_hopper(kernels, row, forward, batch):
    if row.scores == "full":
        batch = replace(batch, softcap=20.0, alibi="bh", sinks=True)
    batch = replace(batch, before=2, after=3 + batch.after)
    check(kernels, row, batch, forward=forward.name)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("few", [1, 2, 7, 32])
def test_each_sequence_is_one_kernel_s(kernels, row, few):
    """The two kernels together write each row, and neither writes one of the other's."""
    x = make(Batch("border", q=(1, 2, 3, 7, 8, 32, 33), k=(40,) * 7, after=2), BF16, 64)
    lengths = torch.tensor([1, 2, 3, 7, 8, 32, 33])
    is_few = torch.cat([(lengths <= few).repeat_interleave(lengths), torch.tensor([False, False])])
    call = calls._common(x.q, *x.held, x.q, torch.empty(4, len(x.q)), True, (-1, -1), None)
    call |= calls.varlen_lengths(x.q, x.held[0], x.cu_q, None, x.options["seqused_k"], 33)
    call |= calls.pages(x.held[0], x.options["block_table"]) | {"few_q": few, "num_splits": 2}
    for run_one, name, mine in (
        (kernels.run, beside(row), ~is_few),
        (kernels.run_decode, row.name, is_few),
    ):
        output = calls.Outputs(
            7.0, out=(tuple(x.q.shape), BF16), lse=((4, len(x.q)), torch.float32)
        )
        run_one(name, call | {"out": calls.view(output.out), "lse": calls.rows(output.lse)})
        out, lse = output.results()
        assert torch.equal((out != 7.0).all(-1).all(-1), mine)
        assert torch.equal((out != 7.0).any(-1).any(-1), mine)
        assert torch.equal((lse != 7.0).all(0), mine)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_batch_invariance(kernels, row):
    """Whatever is beside a sequence, it has the same kernel and the same pieces."""
    batch = Batch("together", q=(1, 5, 40, 20), k=(310, 700, 60, 200))
    x = make(batch, BF16, 64)
    out, lse = run(kernels, row, batch, x, batch_invariant=True)
    for b, (n, keys) in enumerate(zip(batch.q, batch.k, strict=True)):
        rows = slice(int(x.cu_q[b]), int(x.cu_q[b + 1]))
        for said in (n, 200):
            alone, alone_lse = calls.varlen(
                kernels, beside(row), x.q[rows], *x.held, int32([0, n]), None, few=row.name,
                block_table=x.options["block_table"][b : b + 1], seqused_k=int32([keys]),
                causal=True, max_seqlen_q=said, batch_invariant=True,
            )  # fmt: skip
            assert_bitwise("out", alone, out[rows])
            assert_bitwise("lse", alone_lse, lse[:, rows])


# ---- random ones --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*SMALL, *FULL[:1]], ids=id_of)
@pytest.mark.parametrize("seed", range(40))
def test_random_batches(kernels, row, seed):
    rng = random.Random(seed)
    batch, (h, hk) = rng.randint(2, 9), rng.choice([(4, 2), (4, 4), (8, 1), (12, 2)])
    longest = rng.choice([1, 4, 64 * hk // h, 150])
    q = tuple(rng.choice([0, 1, 1, rng.randint(0, longest)]) for _ in range(batch))
    page_size = rng.choice([1, 5, 16, 256]) if longest == 150 else rng.choice([0, 1, 16, 256])
    k = tuple(rng.choice([0, 1, rng.randint(0, 90), rng.randint(0, 600)]) for _ in range(batch))
    mods = {}
    if row.scores == "full":
        mods = {"softcap": rng.choice([0.0, 9.0]), "alibi": rng.choice([None, "h", "bh"])}
    check(
        kernels, row,
        Batch(
            f"random_{seed}", q=q, k=k, h=h, hk=hk, page_size=page_size, said=longest,
            before=rng.choice([0, 3]), after=rng.choice([1, 20]), causal=rng.random() < 0.6,
            window=rng.choice([(-1, -1), (rng.randint(0, 200), rng.randint(-1, 9))]),
            leftpad=rng.choice([None, tuple(rng.randint(0, n) for n in k)]),
            by_used=rng.random() < 0.5, sinks=rng.random() < 0.3, **mods,
        ),
        num_splits=rng.choice([0, 0, 1, 3, 50]),
    )  # fmt: skip


# ---- contents that lie outside ------------------------------------------------------------------


@pytest.mark.parametrize("row", SMALL, ids=id_of)
@pytest.mark.parametrize("seed", range(60))
def test_any_contents(kernels, row, seed):
    """Nothing is written around an output, no output becomes NaN, and counters are left at 0: the
    call after it is right."""
    rng = random.Random(seed)
    batch, total_q, total_k = rng.randint(1, 6), rng.randint(1, 300), rng.randint(1, 300)
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return poisoned(torch.randn(shape, generator=gen).to(BF16))

    options = {"max_seqlen_q": rng.choice([1, 4, 20, 300]), "max_seqlen_k": 2000}
    cu_k, most = offsets(rng, total_k, batch), total_k
    if rng.random() < 0.7 or options["max_seqlen_q"] > 32:
        size, pages, listed = rng.choice([1, 3, 16]), 12, rng.randint(0, 30)
        caches, most = [randn(pages, size, 2, 64) for _ in "kv"], listed * size
        options["block_table"] = numbers(rng, pages - 1, batch, listed)
    else:
        caches = [randn(total_k, 2, 64) for _ in "kv"]
    for name in ("leftpad_k", "seqused_k"):
        if rng.random() < 0.5:
            options[name] = numbers(rng, most, batch)
    is_alone = batch == 1 and options["max_seqlen_q"] > 32 < total_q
    output = calls.varlen(
        kernels, beside(row), randn(total_q, 4, 64), *caches, offsets(rng, total_q, batch), cu_k,
        before=3.0, few=None if is_alone else row.name, num_splits=rng.choice([0, 0, 1, 3, 10**6]),
        **options, **any_mask(rng),
    )  # fmt: skip
    for x in output:
        assert not x.isnan().any()
    check(kernels, row, Batch("after", k=(900, 37, 5, 150)), num_splits=100)


@pytest.mark.parametrize("row", SMALL, ids=id_of)
def test_sequences_that_overlap(kernels, row):
    """They have more row blocks than there are places: a tile has all its pieces or none, so that
    the counters are 0 afterwards, which is looked at after each launch."""
    x = make(Batch("overlap", q=(30, 0, 0, 0, 0), k=(384,) * 5), BF16, 64)
    out, lse = calls.varlen(
        kernels, beside(row), x.q, *x.held, int32([0, 30, 0, 30, 0, 30]), None, few=row.name,
        num_splits=3, before=3.0, max_seqlen_q=30, **x.options,
    )  # fmt: skip
    assert not out.isnan().any()
    assert not lse.isnan().any()
