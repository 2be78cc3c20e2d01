"""The last rows of a forward for Hopper, cut along the keys beside the last round of the others."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from compare import assert_accurate, assert_bitwise, assert_lse
from reference import attention_ref, standard_attention

from build_tools.instantiate import load_table
from flash_attn import flash_attn_func
from tests.kernels import library  # the one that every suite serves with: it registers once

from . import calls
from .test_hopper_forward import check_dense
from .test_key_splits import DTYPES, id_of

ROWS = [
    v for v in load_table().VARIANTS if (v.direction, v.arch, v.scores) == ("fwd", "sm90", "plain")
]


@dataclass
class Cut:
    kernels: ModuleType
    rows: int
    parts: int

    def run(self, variant: str, call: dict) -> None:
        self.kernels.run(variant, call | {"last_rows": self.rows, "key_splits": self.parts})


@pytest.mark.parametrize("row", ROWS, ids=id_of)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("behind", "parts"), [(0, 2), (70, 3)])
def test_rows_behind_whole_ones(kernels, row, group, behind, parts):
    """Two row blocks whole; parts of what is left, and of more than that."""
    gen = torch.Generator().manual_seed(group)
    sq = 3 * row.block_m + behind
    q = torch.randn(2, sq, 2 * group, row.head_dim, generator=gen).to(DTYPES[row.dtype])
    k = torch.randn(2, 700, 2, row.head_dim, generator=gen).to(q.dtype)
    v = torch.randn(2, 700, 2, row.head_dim_v, generator=gen).to(q.dtype)
    check_dense(Cut(kernels, sq - 2 * row.block_m, parts), row, q, k, v)


def problem(**changed) -> dict:
    shape = {"batch": 1, "seqlen_q": 8192, "seqlen_k": 8192, "heads_q": 16, "heads_kv": 16}
    return calls.problem(**shape | {"q": (0, 0, 0, 64), "head_dim": 64, "head_dim_v": 64} | changed)


def test_rows_that_an_h200_cuts(kernels):
    """688 tiles, 5.2 rounds of 132: rows of two row blocks, or a few more; the others are whole."""
    rows, parts = kernels.last_rows("fwd_sm90_bf16_d64_plain", problem(), sm_count=132)
    assert 192 < rows <= 4 * 192
    assert (8192 - rows) % 192 == 0
    assert parts > 2


@pytest.mark.parametrize(
    "changed",
    [
        {"right": 0},
        {"left": 1000},
        {"batch_invariant": True},
        {"used_k": 1},
        {"cu_k": 1},
        {"cu_q": 1, "total_q": 8192},
        {"block_table": 1, "page_size": 64},
        {"q": (0, 0, 0, 0)},  # all heads have the same queries
        {"seqlen_k": 0},
        {"seqlen_q": 24 * 192, "heads_q": 11, "heads_kv": 11},  # two rounds
    ],
)
def test_calls_that_are_not_cut(kernels, changed):
    call = problem(**changed)
    assert kernels.last_rows("fwd_sm90_bf16_d64_plain", call, sm_count=132) == (0, 0)


def test_kernels_that_cannot(kernels):
    for name in ("fwd_sm80_bf16_d64_plain", "fwd_sm90_bf16_d64_full"):
        assert kernels.last_rows(name, problem(), sm_count=132) == (0, 0)


def test_results_in_parts_are_no_more_than_64_mb(kernels):
    """Two row blocks a head, whose parts take 18 MiB each, and whose keys would do for many."""
    call = problem(seqlen_q=384, seqlen_k=1 << 18, heads_q=361, heads_kv=361)
    rows, parts = kernels.last_rows("fwd_sm90_bf16_d64_plain", call, sm_count=132)
    assert (rows, parts) in {(192, 2), (192, 3)}


def test_a_call_whose_last_rows_are_cut(kernels, monkeypatch):
    """Two row blocks of two heads on three multiprocessors."""
    gen = torch.Generator().manual_seed(1)
    q = torch.randn(1, 192 + 40, 2, 64, generator=gen).to(DTYPES["bf16"])
    k, v = torch.randn(2, 1, 6000, 2, 64, generator=gen).to(q.dtype)
    with library.serving(monkeypatch, 90):
        (cut, cut_lse), (whole, lse) = (
            flash_attn_func(q, k, v, batch_invariant=alone, return_lse=True)
            for alone in (False, True)
        )
    assert_bitwise("out", cut[:, :192], whole[:, :192])
    assert_bitwise("lse", cut_lse[..., :192], lse[..., :192])
    assert not torch.equal(cut_lse, lse)
    assert_lse("lse", cut_lse, lse)
    assert_accurate("out", cut, *(f(q, k, v)[0] for f in (attention_ref, standard_attention)))
