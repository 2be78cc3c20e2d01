"""The GPU kernels, run on the host: every tile, mask, score mod and index of the whole table.

What a GPU adds (its scheduling, its memory system, its speed) needs one; the suites above this
folder run there.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from calls import lse_in_float32
from cases import OFFSET, SEED, Case, make_inputs, poisoned, rng_state
from compare import assert_accurate, assert_lse
from reference import attention_ref, random_slopes, standard_attention, varlen_ref
from reference_dropout import keep_mask

from . import calls
from .rows import DTYPES, FORWARDS, id_of

ROWS = FORWARDS
FULL = [v for v in ROWS if v.scores == "full"]


def in_turns(rows: list, values: list) -> list:
    """(row, value) for every tile and value; the tile's two dtypes take turns at the values."""

    def tile(row) -> str:
        return row.name.replace(f"_{row.dtype}_", "_")

    tiles = list(dict.fromkeys(map(tile, rows)))
    return [
        pytest.param(row, value, id=f"{row.name}-{value}")
        for row in rows
        for turn, value in enumerate(values, start=tiles.index(tile(row)))
        if turn % 2 == (row.dtype == "fp16")
    ]


def check(kernels, row, case: Case, rng=None) -> None:
    x = make_inputs(case)
    if case.layout == "poisoned":
        x.v = poisoned(x.v, around=16)  # k and v have strides of their own
    kwargs = case.mask_kwargs() | x.scores_kwargs() | {"softcap": case.softcap}
    kwargs |= {"dropout_p": case.dropout_p, "softmax_scale": case.scale}
    out, lse = calls.dense(kernels, row.name, x.q, x.k, x.v, **kwargs, rng_state=rng)
    kwargs["keep_mask"] = x.keep_mask
    expected, expected_lse, _ = attention_ref(x.q, x.k, x.v, **kwargs)
    standard, _, _ = standard_attention(x.q, x.k, x.v, **kwargs)
    assert_accurate("out", out, expected, standard)
    inputs = {"q": x.q, "k": x.k, "v": x.v}
    in_float32 = partial(lse_in_float32, partial(standard_attention, **kwargs), inputs)
    assert_lse("lse", lse, expected_lse, in_float32)


SHAPES = [
    dict(sq=1, sk=1, h=6, hk=2),
    dict(sq=129, sk=257),
    dict(sq=257, sk=129, causal=True),  # the first rows see nothing
    dict(sq=113, sk=203, causal=True),
    dict(sq=150, sk=300, window=(37, 5)),
    dict(sq=300, sk=150, window=(0, 17)),
    dict(sq=200, sk=333, window=(60, -1), causal=True, layout="transposed"),
    dict(sq=5, sk=0),
]


@pytest.mark.parametrize(("row", "shape"), in_turns(ROWS, SHAPES))
def test_masks_and_lengths(kernels, row, shape):
    sizes = dict(b=1, h=2, hk=1, d=row.head_dim, dv=row.head_dim_v) | shape
    check(kernels, row, Case(dtype=DTYPES[row.dtype], **sizes))


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_smaller_head_dims_are_zero_filled(kernels, row):
    smaller, much_smaller = row.head_dim - 24, 8
    dv = row.head_dim_v - 8 if row.dtype == "bf16" else much_smaller
    sizes = dict(b=2, sq=60, sk=140, h=3, hk=3, d=smaller, dv=dv)
    check(kernels, row, Case(dtype=DTYPES[row.dtype], causal=True, **sizes))


KINDS = ["low_rank", "outliers", "large", "constant"]


@pytest.mark.parametrize(("row", "kind"), in_turns(ROWS, KINDS))
def test_adversarial_values(kernels, row, kind):
    sizes = dict(b=1, h=1, hk=1, d=row.head_dim, dv=row.head_dim_v)
    check(kernels, row, Case(dtype=DTYPES[row.dtype], kind=kind, **sizes))


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_rising_scores(kernels, row):
    """Maxima that grow in each key block, in some rows by more than the softmax's slack."""
    sk = 6 * row.block_n
    x = make_inputs(Case(DTYPES[row.dtype], b=1, sq=70, sk=sk, h=1, hk=1, d=row.head_dim))
    x.k *= torch.linspace(8, 0, sk).view(1, sk, 1, 1)  # the last key block comes first
    out, lse = calls.dense(kernels, row.name, x.q, x.k, x.k[..., : row.head_dim_v])
    inputs = x.q, x.k, x.k[..., : row.head_dim_v]
    expected, expected_lse, _ = attention_ref(*inputs)
    standard, _, _ = standard_attention(*inputs)
    assert_accurate("out", out, expected, standard)
    assert_lse("lse", lse, expected_lse)


SCORE_MODS = [
    dict(softcap=3.0),
    dict(alibi="h"),
    dict(alibi="bh", causal=True, sk=190),
    dict(sinks=True, sq=190, causal=True),  # rows with nothing but the sink
    dict(dropout_p=0.3),
    dict(softcap=20.0, alibi="bh", sinks=True, dropout_p=0.17, window=(50, 3), sk=170),
    dict(scale=-0.2, sk=200),
    dict(scale=0.0, causal=True),
    dict(scale=-9.0, kind="constant"),  # the first block's maximum is far below 0
]


@pytest.mark.parametrize(("row", "mods"), in_turns(FULL, SCORE_MODS))
def test_score_mods(kernels, row, mods):
    sizes = dict(b=2, h=2, hk=1, d=row.head_dim, dv=row.head_dim_v)
    case = Case(dtype=DTYPES[row.dtype], **sizes, **mods)
    check(kernels, row, case, rng_state("cpu"))


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_varlen(kernels, row):
    """Zero lengths anywhere, keys in use, left padding, rows after the last sequence."""
    gen = torch.Generator().manual_seed(1)
    lengths_q, lengths_k = [0, 150, 3, 0, 60], [10, 70, 200, 5, 0]
    used, leftpad = [10, 66, 133, 0, 0], [0, 3, 50, 0, 0]
    cu_q, cu_k = (
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for n in (lengths_q, lengths_k)
    )
    spare, heads = row.block_m + 12, 2  # more rows behind the sequences than a tile has

    def rows(total: int, heads: int, head_dim: int = row.head_dim) -> torch.Tensor:
        return torch.randn(total, heads, head_dim, generator=gen).to(DTYPES[row.dtype])

    q, k, v = rows(sum(lengths_q) + spare, heads), rows(300, 1), rows(300, 1, row.head_dim_v)
    q[cu_q[-1] :] = k[cu_k[-1] :] = v[cu_k[-1] :] = float("nan")
    for b, (start, n, pad) in enumerate(zip(cu_k.tolist(), used, leftpad, strict=False)):
        for x in (k, v):
            x[start : start + pad] = x[start + n : cu_k[b + 1]] = float("nan")
    full = {}
    if row.scores == "full":
        full = {"alibi_slopes": random_slopes((5, heads), gen), "s_aux": torch.randn(heads)}
    ints = [torch.tensor(x, dtype=torch.int32) for x in (used, leftpad)]
    out, lse = calls.varlen(
        kernels, row.name, q, k, v, cu_q, cu_k,
        seqused_k=ints[0], leftpad_k=ints[1], causal=True, **full,
    )  # fmt: skip
    expected, standard = (
        varlen_ref(
            attention, q, k, v, cu_q.tolist(), cu_k.tolist(),
            seqused_k=used, leftpad_k=leftpad, causal=True, **full,
        )
        for attention in (attention_ref, standard_attention)
    )  # fmt: skip
    assert_accurate("out", out, expected[0], standard[0])
    assert_lse("lse", lse, expected[1])


@pytest.mark.parametrize("row", FULL, ids=id_of)
def test_dropout_bits_are_the_contracts(kernels, row):
    """With V the identity and q = 0, out tells for every (query, key) whether it was kept."""
    n, heads, p = row.head_dim_v, 3, 0.4
    q = torch.zeros(1, 77, heads, row.head_dim, dtype=DTYPES[row.dtype])
    k = torch.zeros(1, n, heads, row.head_dim, dtype=q.dtype)
    v = torch.eye(n, dtype=q.dtype)[None, :, None].expand(1, n, heads, n).contiguous()
    out, _ = calls.dense(kernels, row.name, q, k, v, dropout_p=p, rng_state=rng_state("cpu"))
    kept = out.transpose(1, 2) != 0  # (b, h, sq, sk)
    assert torch.equal(kept, keep_mask(SEED, OFFSET, 1, heads, 77, n, p))


@pytest.mark.parametrize("row", [v for v in ROWS if v.arch == "sm80"], ids=id_of)
def test_shared_memory_banks(kernels, row):
    """No two lanes of an access want different words of one bank."""
    kernels.bank_counts()
    sizes = dict(b=1, sq=130, sk=260, h=1, hk=1, d=row.head_dim, dv=row.head_dim_v)
    check(kernels, row, Case(dtype=DTYPES[row.dtype], **sizes))
    counts = kernels.bank_counts()
    assert {"cp.async", "ldmatrix", "ldmatrix.trans"} <= counts.keys()
    assert all(conflicts == 0 for _, conflicts in counts.values()), counts
